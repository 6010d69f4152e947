"""Tests of the GSM8K example, from its source to rewards, with a scripted model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_loop.rollout.rows import load_rows
from agent_loop.servers.scripted import ScriptedReply
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from examples.gsm8k.preprocess import main
from tests.examples.scripted import run_scripted
from tests.helpers import text_reply, tool_call_reply

FOLDER = Path("examples/gsm8k")
TRUTHS = ["39", "33", "1400", "-5"]


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    out = tmp_path / "data" / "train.parquet"
    assert main([str(FOLDER / "sample.jsonl"), "--out", str(out)]) == 0
    return load_rows([str(out)], prompt_key="prompt")


def run(task_rows: list[dict[str, Any]], *turns: ScriptedReply) -> list[Trajectory]:
    return run_scripted(FOLDER, task_rows, lambda request: turns[request.turn])


def test_preprocessing_creates_a_row_for_each_record(tmp_path: Path) -> None:
    task_rows = rows(tmp_path)
    assert [row["reward_model"]["ground_truth"] for row in task_rows] == TRUTHS
    first = task_rows[0]
    assert first["agent_name"] == "tool_agent"
    assert first["tools_kwargs"] == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "39"}}}
    assert first["interaction_kwargs"]["query"] == first["raw_prompt"][-1]["content"]
    assert "39" not in json.dumps(first["raw_prompt"])
    assert first["extra_info"]["split"] == "train"


def test_the_tool_s_score_is_the_reward(tmp_path: Path) -> None:
    [row, *_] = rows(tmp_path)
    [trajectory] = run(
        [row],
        tool_call_reply("calc_gsm8k_reward", answer="38"),
        tool_call_reply("calc_gsm8k_reward", answer="39"),
        text_reply("So it is #### 38"),
        text_reply("No: #### 39"),
    )
    output = trajectory.output
    assert output.failure is None
    assert output.tool_rewards == (-0.05, 0.0)
    assert output.turn_scores == (0.0, 1.0)
    assert output.stop_reason is StopReason.INTERACTION_FINISHED
    assert trajectory.reward == 1.0


@pytest.mark.parametrize(("answer", "rewards"), [("#### 1,400", [0.0, 0.0, 1.0, 0.0]), ("none", [0.0] * 4)])
def test_without_a_tool_call_the_reward_function_scores_the_answer(
    tmp_path: Path, answer: str, rewards: list[float]
) -> None:
    trajectories = run(rows(tmp_path), *[text_reply(answer)] * 6)
    assert [trajectory.output.failure for trajectory in trajectories] == [None] * 4
    assert [trajectory.reward for trajectory in trajectories] == rewards
