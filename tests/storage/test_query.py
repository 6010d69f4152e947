"""Queries of stored trajectories."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.errors import DataError
from agent_loop.storage import StoredRun, write_trajectories
from agent_loop.storage.query import Condition, find
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
