"""Preference pairs of stored trajectories: the best and the worst of each group, after the same prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.errors import DataError
from agent_loop.storage import StoredRun, write_trajectories
from agent_loop.storage.query import Condition, preference_pairs
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import Message
from tests.storage.samples import failed, solved

PROMPT: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "2 + 2?"}]


def answered(text: str, reward: float | None, *, prompt: list[Message] = PROMPT, **place: Any) -> Trajectory:
    messages = [*prompt, {"role": "assistant", "content": text}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    output = AgentLoopOutput(segments=solved().output.segments, messages=messages, tool_schemas=tools)
    return structs.replace(solved(**place), output=output, reward=reward)


def stored(folder: Path, *trajectories: Trajectory, step: int = 1) -> StoredRun:
    path = folder / "trajectories" / f"train-{step:06d}.parquet"
    write_trajectories(path, list(trajectories), step=step, split="train")
    return StoredRun(folder)


def texts(pairs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(pair["chosen"][-1]["content"], pair["rejected"][-1]["content"]) for pair in pairs]


def test_the_best_and_the_worst_of_each_group_are_a_pair(tmp_path: Path) -> None:
    run = stored(
        tmp_path,
        answered("good", 0.5, rollout=0),
        answered("best", 1.0, rollout=1),
        answered("bad", 0.0, rollout=2),
        answered("one", 1.0, group=1, rollout=0),
        answered("two", 0.5, group=1, rollout=1),
    )

    pairs = list(preference_pairs(run))

    assert texts(pairs) == [("best", "bad"), ("one", "two")]
    assert pairs[0]["prompt"] == PROMPT
    assert (pairs[0]["chosen_reward"], pairs[0]["rejected_reward"]) == (1.0, 0.0)
    assert pairs[0]["tools"] == [{"type": "function", "function": {"name": "add"}}]


def test_groups_without_a_preference_or_with_different_prompts_have_no_pair(tmp_path: Path) -> None:
    other: list[Message] = [{"role": "user", "content": "3 + 3?"}]
    run = stored(
        tmp_path,
        answered("a", 1.0, rollout=0),
        answered("b", 1.0, rollout=1),
        answered("c", 1.0, group=1, rollout=0),
        answered("d", None, group=1, rollout=1),
        failed(group=1, rollout=2),
        answered("e", 1.0, group=2, rollout=0),
        answered("f", 0.0, group=2, rollout=1, prompt=other),
    )

    assert list(preference_pairs(run)) == []


def test_groups_of_different_steps_are_not_mixed(tmp_path: Path) -> None:
    stored(tmp_path, answered("a", 1.0), step=1)
    run = stored(tmp_path, answered("b", 0.0), step=2)

    assert list(preference_pairs(run)) == []


def test_conditions_select_trajectories(tmp_path: Path) -> None:
    run = stored(
        tmp_path, answered("a", 1.0, rollout=0), answered("b", 0.5, rollout=1), answered("c", 0.0, rollout=2)
    )

    assert texts(list(preference_pairs(run, where=[Condition.parse("reward>0.2")]))) == [("a", "b")]
    with pytest.raises(DataError, match="there is no column"):
        list(preference_pairs(run, where=[Condition.parse("rewards>0.2")]))


def test_the_command_writes_a_line_for_each_pair(tmp_path: Path) -> None:
    stored(tmp_path / "run", answered("a", 1.0, rollout=0), answered("b", 0.0, rollout=1))
    out = tmp_path / "new" / "pairs.jsonl"

    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--pairs", "--out", str(out)])

    assert result.exit_code == 0, result.output
    assert "1 preference pairs are in" in result.output
    [line] = map(json.loads, out.read_text().splitlines())
    assert line["prompt"] == PROMPT
    assert line["chosen"] == [{"role": "assistant", "content": "a"}]
    assert line["rejected"] == [{"role": "assistant", "content": "b"}]


def test_conditions_without_pairs_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(tmp_path), "--out", "x", "--where", "reward>0"])

    assert result.exit_code == 2
    assert "needs --pairs" in result.output
