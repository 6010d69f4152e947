"""Trajectories as JSON lines: the columns of the Parquet files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.errors import DataError
from agent_loop.storage import StoredRun, write_trajectories
from agent_loop.storage.columns import SCHEMA
from agent_loop.storage.json_lines import read_lines, stored_copy, write_lines
from tests.storage.samples import failed, solved, without_logprobs


def same(mine: Any, its: Any) -> bool:
    return np.array_equal(mine, its, equal_nan=True) if isinstance(mine, np.ndarray) else mine == its


def test_a_file_of_lines_and_a_parquet_file_hold_the_same(tmp_path: Path) -> None:
    both = [solved(), failed(), without_logprobs()]
    write_lines(tmp_path / "lines.jsonl", both, split="rollout")
    write_trajectories(tmp_path / "a.parquet", both, step=0, split="rollout")
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text("utf-8").splitlines()]
    assert [list(line) for line in lines] == [SCHEMA.names] * 3
    assert all(isinstance(line["row"], dict) for line in lines)
    (tmp_path / "copy").mkdir()
    copy = StoredRun(stored_copy(tmp_path / "lines.jsonl", folder=tmp_path / "copy"))
    for mine, its in zip(copy.rows(), StoredRun(tmp_path / "a.parquet").rows(), strict=True):
        assert [name for name in its if not same(mine[name], its[name])] == []


def test_a_line_without_a_trajectory_is_named_and_one_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    write_lines(path, [solved(rollout=0), solved(rollout=1)], split="rollout")
    whole = path.read_text("utf-8")
    path.write_text(whole[:-40], encoding="utf-8")
    assert [row["rollout"] for row in read_lines(path)] == [0]
    path.write_text(whole[:-40] + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"lines.jsonl' line 2 holds no trajectory: "):
        list(read_lines(path))
    path.write_text('{"trajectory_id": "a", "segments": []}\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 1 holds no trajectory: it has no 'prompt_ids'"):
        list(read_lines(path))
