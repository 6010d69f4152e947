"""Queries of stored runs: conditions, preference pairs, and the texts of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.errors import DataError
from agent_loop.storage import StoredRun, write_trajectories
from agent_loop.storage.query import Condition, find, preference_pairs
from agent_loop.storage.row_texts import MAX_LETTERS, text_columns
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import Message
from tests.storage.samples import failed, solved, without_logprobs


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    folder = tmp_path / "trajectories"
    trajectories = [solved(reward=0.25), solved(rollout=2, reward=0.75), failed(), without_logprobs()]
    write_trajectories(folder / "train-000001.parquet", trajectories, step=1, split="train")
    write_trajectories(folder / "val-000001.parquet", [solved(group=7)], step=1, split="val")
    return StoredRun(tmp_path)


def ids(table: object) -> list[str]:
    return table.column("trajectory_id").to_pylist()


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("reward<1", ["group=0/rollout=0", "group=0/rollout=2", "group=7/rollout=0"]),
        ("reward >= 0.75", ["group=0/rollout=2", "group=1/rollout=0/branch=1"]),
        ("reward=null", ["group=0/rollout=1"]),
        ("branch != null", ["group=1/rollout=0/branch=1"]),
        ("is_success=true", ["group=1/rollout=0/branch=1"]),
        ("stop_reason=failed", ["group=0/rollout=1"]),
        ("stop_reason!=answered", ["group=0/rollout=1", "group=1/rollout=0/branch=1"]),
        ("trajectory_id='group=7/rollout=0'", ["group=7/rollout=0"]),
    ],
)
def test_conditions_compare_columns_with_values(run: StoredRun, condition: str, found: list[str]) -> None:
    assert ids(find(run, where=[Condition.parse(condition)])) == found


def test_conditions_texts_splits_and_orders_can_be_combined(run: StoredRun) -> None:
    conditions = [Condition.parse("reward<1"), Condition.parse("num_tool_calls=1")]
    assert ids(find(run, where=conditions, sort="-reward", split="train")) == [
        "group=0/rollout=2",
        "group=0/rollout=0",
    ]
    assert ids(find(run, text="VIER ☃", split="val")) == ["group=7/rollout=0"]
    assert ids(find(run, text="surrogate")) == ["group=0/rollout=1"]
    assert ids(find(run, text="a text that is in no trajectory")) == []


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("rewrd<1", "did you mean 'reward'"),
        ("messages=x", "no column 'messages' to compare"),
        ("reward", "is not a comparison"),
        ("reward<high", "compares reward, which is a number, with 'high'; give a number after"),
        ("is_success=1", "which is true or false"),
        ("reward<null", "only = and != can"),
    ],
)
def test_an_invalid_condition_is_refused(condition: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Condition.parse(condition)


def test_the_headings_of_the_table_name_its_columns(run: StoredRun) -> None:
    assert Condition.parse("calls=1") == Condition.parse("num_tool_calls=1")
    assert ids(find(run, sort="-tokens")) == ids(find(run, sort="-num_model_tokens"))


def test_an_unknown_order_is_refused(run: StoredRun) -> None:
    with pytest.raises(DataError, match="no column 'lenght' to compare"):
        find(run, sort="-lenght")


# -- preference pairs --------------------------------------------------------------------------------------------------

PROMPT: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "2 + 2?"}]
REWARDS = {"good": 0.5, "best": 1.0, "bad": 0.0}


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
    group = [answered(text, reward, rollout=n) for n, (text, reward) in enumerate(REWARDS.items())]
    one, two = answered("one", 1.0, group=1), answered("two", 0.5, group=1, rollout=1)
    run = stored(tmp_path, *group, one, two)
    pairs = list(preference_pairs(run))
    assert texts(pairs) == [("best", "bad"), ("one", "two")]
    assert pairs[0]["prompt"] == PROMPT
    assert (pairs[0]["chosen_reward"], pairs[0]["rejected_reward"]) == (1.0, 0.0)
    assert pairs[0]["tools"] == [{"type": "function", "function": {"name": "add"}}]
    of_some = list(preference_pairs(run, where=[Condition.parse("reward>0.2")]))
    assert texts(of_some) == [("best", "good"), ("one", "two")]
    with pytest.raises(DataError, match="there is no column"):
        list(preference_pairs(run, where=[Condition.parse("rewards>0.2")]))


def test_groups_without_a_preference_or_with_different_prompts_have_no_pair(tmp_path: Path) -> None:
    other: list[Message] = [{"role": "user", "content": "3 + 3?"}]
    run = stored(
        tmp_path,
        *(answered("a", 1.0, rollout=n) for n in range(2)),
        *(answered("c", 1.0, group=1), answered("d", None, group=1, rollout=1), failed(group=1, rollout=2)),
        *(answered("e", 1.0, group=2), answered("f", 0.0, group=2, rollout=1, prompt=other)),
    )
    assert list(preference_pairs(run)) == []


def test_groups_of_different_steps_are_not_mixed(tmp_path: Path) -> None:
    stored(tmp_path, answered("a", 1.0), step=1)
    run = stored(tmp_path, answered("b", 0.0), step=2)

    assert list(preference_pairs(run)) == []


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


# -- texts of rows -----------------------------------------------------------------------------------------------------


def columns_of(**columns: list[Any]) -> dict[str, list[Any]]:
    texts = {
        name: [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
        for name, values in columns.items()
    }
    found = text_columns(pa.table({name: pa.array(values, pa.string()) for name, values in texts.items()}))
    return {name: column.to_pylist() for name, column in found.items()}


def asked(*messages: Any) -> dict[str, Any]:
    return {"raw_prompt": [{"role": role, "content": content} for role, content in messages]}


@pytest.mark.parametrize(
    ("row", "prompt", "target"),
    [
        ({**asked(("system", "s"), ("user", "How\nmany?")), "answer": 3}, "How many?", "3"),
        (asked(("system", "Play.")), "Play.", None),
        ({"prompt": "x" * 500, "reward_model": {"ground_truth": ["a", "b"]}}, "x" * 199 + "…", "a b"),
        (
            asked(("user", [{"type": "text", "text": "see"}, {"type": "image"}])),
            'see {"type": "image"}',
            None,
        ),
        ([1], None, None),
        ("not json", None, None),
    ],
)
def test_prompt_and_target_are_read_from_the_row(row: Any, prompt: str | None, target: str | None) -> None:
    found = columns_of(row=[row])
    assert (found.get("prompt", [None])[0], found.get("target", [None])[0]) == (prompt, target)
    assert len(found.get("prompt", [""])[0] or "") <= MAX_LETTERS


def test_each_number_of_the_reward_function_is_a_column() -> None:
    extras = ['{"exact": 1, "ok": true, "note": "x", "odd": NaN}', None, {"exact": 0.5}]
    found = columns_of(reward_extra=extras)
    assert found == {"reward/exact": [1.0, None, 0.5], "reward/ok": [1.0, None, None]}


def test_columns_that_are_missing_or_empty_are_left_out() -> None:
    assert text_columns(pa.table({"step": [1]})) == {}
    assert columns_of(answer=["", None], row=[None, None]) == {}
