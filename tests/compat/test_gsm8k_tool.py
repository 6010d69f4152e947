from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_loop.integrations.verl.gsm8k import NO_PROGRESS_PENALTY
from agent_loop.rewards.function import RewardFunction
from agent_loop.tools.registry import load_tools
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.helpers import text_reply, tool_call_reply, user
from tests.rollout.harness import WorkerHarness

VERL_REGISTRY = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "A tool for calculating the reward of gsm8k. (1.0 if parsed answer is correct, 0.0 if not)"
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The model's answer to the GSM8K math problem, must be a digits"
          required: ["answer"]
"""


def answers(*given: str, ground_truth: Any, tmp_path: Path) -> Trajectory:
    (tmp_path / "tools.yaml").write_text(VERL_REGISTRY)
    tools = load_tools([], config_path=tmp_path / "tools.yaml")
    script = [
        *(tool_call_reply("calc_gsm8k_reward", answer=answer) for answer in given),
        text_reply("so it is"),
    ]
    create = {"create_kwargs": {"ground_truth": ground_truth}}
    harness = WorkerHarness(
        script, tools=list(tools.values()), reward=RewardFunction(lambda output, row: -1.0, timeout_s=1)
    )
    return harness.run_one(tools_kwargs={"calc_gsm8k_reward": create})


def test_a_registry_file_of_verl_scores_a_trajectory(tmp_path: Path) -> None:
    trajectory = answers("41", "#### 42", ground_truth="42", tmp_path=tmp_path)
    assert trajectory.output.tool_rewards == (NO_PROGRESS_PENALTY, 0.0)
    assert trajectory.reward == 1.0
    replies = [m["content"] for m in trajectory.output.messages if m["role"] == "tool"]
    assert replies == [
        "Current parsed answer='41' reward=0.0",
        "Current parsed answer='#### 42' reward=1.0",
    ]
    assert [f.extra for f in trajectory.output.feedback] == [{"is_correct": False}, {"is_correct": True}]


def test_a_second_right_answer_earns_a_penalty_and_the_last_answer_counts(tmp_path: Path) -> None:
    trajectory = answers("42", "42", "7", ground_truth="42", tmp_path=tmp_path)
    assert trajectory.output.tool_rewards == (0.0, NO_PROGRESS_PENALTY, NO_PROGRESS_PENALTY)
    assert trajectory.reward == 0.0


def test_a_row_without_a_number_fails_with_the_reason(tmp_path: Path) -> None:
    trajectory = answers("42", ground_truth=None, tmp_path=tmp_path)
    assert trajectory.output.stop_reason is StopReason.FAILED
    assert trajectory.output.failure is not None
    assert "ground_truth is None; give the right number" in trajectory.output.failure.error


def test_without_a_ground_truth_the_tool_scores_nothing_and_the_reward_function_is_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tools.yaml").write_text(VERL_REGISTRY)
    tools = list(load_tools([], config_path=tmp_path / "tools.yaml").values())
    script = [tool_call_reply("calc_gsm8k_reward", answer="42"), text_reply("so it is")]
    harness = WorkerHarness(script, tools=tools, reward=RewardFunction(lambda output, row: 0.25, timeout_s=1))
    first, second = harness.run([{"raw_prompt": user("6 * 7?")}] * 2)
    assert first.output.failure is None
    assert first.output.messages[2]["content"] == "Current parsed answer='42' reward=0.0"
    assert first.output.tool_rewards == ()
    assert (first.reward, second.reward) == (0.25, 0.25)
    warnings = [record for record in caplog.records if "without a ground truth" in record.getMessage()]
    assert len(warnings) == 1
