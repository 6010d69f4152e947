from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agent_loop.errors import DataError
from agent_loop.viewer.packets import KINDS, packet
from agent_loop.viewer.run_files import read_new_lines
from agent_loop.viewer.source import RunSource
from tests.viewer.synthetic import PIECES, add_step, write_run

TYPES = {kind: np.dtype(name) for name, kind in KINDS.items()}


def unpacked(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Decode a packet like the page: meta, and columns as lists."""
    (length,) = struct.unpack_from("<I", data)
    head = json.loads(data[4 : 4 + length])
    columns: dict[str, Any] = {}
    for column in head["columns"]:
        start = 4 + length + column["offset"]
        assert start % 8 == 0
        values = np.frombuffer(data, TYPES[column["kind"]], column["length"], start)
        columns[column["name"]] = values.tolist()
        if "dictionary" in column:
            names = [*column["dictionary"], None]
            columns[column["name"]] = [names[code] for code in values]
    return head["meta"], columns


def test_packets_keep_values_and_nulls() -> None:
    values = {
        "text": pa.chunked_array([["a", None], ["b", "a"]]),
        "flag": pa.chunked_array([[True, None, False, True]]),
        "whole": pa.chunked_array([[1, -2, 3, 4]]),
        "large": pa.chunked_array([[2**40, 0, 0, 0]]),
        "holes": pa.chunked_array([[1, None, 3, 4]]),
        "real": pa.chunked_array([[0.5, None, 1.5, 2.5]], pa.float32()),
    }
    meta, columns = unpacked(packet({"note": "naïve \U0001f600"}, values))
    assert meta == {"note": "naïve \U0001f600"}
    expected = {
        "text": ["a", None, "b", "a"],
        "flag": [1, 2, 0, 1],
        "whole": [1, -2, 3, 4],
        "large": [2**40, 0, 0, 0],
    }
    assert {name: columns[name] for name in expected} == expected
    np.testing.assert_array_equal(columns["holes"], [1, np.nan, 3, 4])
    np.testing.assert_array_equal(columns["real"], [0.5, np.nan, 1.5, 2.5])


def test_the_table_has_the_rows_of_the_requested_files(run_folder: Path) -> None:
    source = RunSource(run_folder)
    numbers = source.state()["files"]
    _, columns = unpacked(source.table(numbers[-2:]))
    assert set(columns["step"]) == {5, 6}
    assert set(columns["file"]) == set(numbers[-2:])
    assert columns["row_in_file"][:3] == [0, 1, 2]
    assert "messages" not in columns
    assert "row" not in columns
    assert unpacked(source.table([999])) == ({}, {})


def test_a_trajectory_has_all_values_of_each_token(run_folder: Path) -> None:
    data = RunSource(run_folder).trajectory(split="train", step=3, trajectory_id="group=0/rollout=0")
    meta, columns = unpacked(data)
    length = meta["prompt_length"] + meta["response_length"]
    assert {len(columns[name]) for name in ("ids", "mask", "versions", "logprobs", "advantages")} == {length}
    assert columns["mask"][: meta["prompt_length"]] == [0] * meta["prompt_length"]
    assert columns["versions"][meta["prompt_length"]] == 2
    assert np.isnan(columns["logprobs"][0])
    assert [PIECES[token] for token in columns["used_ids"]] == meta["pieces"]
    assert meta["messages"][1]["role"] == "user"
    assert meta["reward_extra"] == {"acc": 1, "odd": "NaN"}


def test_what_is_missing_is_an_error(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no trajectory group=9/rollout=9 of train step 3 is stored"):
        RunSource(run_folder).trajectory(split="train", step=3, trajectory_id="group=9/rollout=9")
    with pytest.raises(DataError, match="there is no run at"):
        RunSource(tmp_path / "nothing")
    with pytest.raises(DataError, match="holds no run"):
        RunSource(tmp_path)


def test_the_timeline_has_one_entry_per_rollout_with_the_weights_of_each_completion(run_folder: Path) -> None:
    entries = RunSource(run_folder).timeline(split="train", step=3)
    assert len(entries) == 16
    completions = [span for entry in entries for span in entry["spans"] if span[0] == "generate"]
    assert {span[4]["weight_version"] for span in completions} == {2}


def test_search_looks_at_texts_and_not_at_their_storage_format(run_folder: Path) -> None:
    source = RunSource(run_folder)
    number = source.state()["files"][0]
    texts = ["NÄHER\n<b>", "€", "\U0001f600", "no order", "tool_calls", "content"]
    *everywhere, some, key, name = [len(source.search(text, [number])[number]) for text in texts]
    assert everywhere == [17] * 3
    assert 0 < some < 17
    assert (key, name) == (0, 0)


def test_added_changed_and_removed_files_are_followed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=2)
    source = RunSource(run)
    first = source.state()["files"]
    add_step(run, step=3)
    assert source.state()["files"][:2] == first
    (run / "trajectories" / "train-000001.parquet").unlink()
    add_step(run, step=2, num_groups=1)
    now = source.state()["files"]
    assert first[1] not in now
    assert len(now) == 2
    _, columns = unpacked(source.table(now))
    assert columns["step"].count(2) == 4


def test_an_unreadable_file_is_skipped_and_unknown_columns_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=1)
    (run / "trajectories" / "train-000002.parquet").write_bytes(b"PAR1 not all of it")
    source = RunSource(run)
    _, columns = unpacked(source.table(source.state()["files"]))
    assert set(columns["step"]) == {1}
    (problem,) = source.state()["problems"]
    assert problem.startswith("train-000002.parquet: ")
    assert source.timeline(split="train", step=1)
    pq.write_table(pa.table({"novel": [0.5], "step": [1], "long_text": ["x" * 1000]}), tmp_path / "x.parquet")
    source = RunSource(tmp_path / "x.parquet")
    _, columns = unpacked(source.table(source.state()["files"]))
    assert columns["novel"] == [0.5]
    assert "long_text" not in columns
    assert source.timeline(split="train", step=1) == []


def test_metrics_are_read_incrementally_and_incomplete_lines_are_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\nnot json\n[1]\n{"step": 2, "a"')
    part = read_new_lines(path)
    assert [line["step"] for line in part.lines] == [1]
    assert part.num_damaged == 2
    with path.open("a") as file:
        file.write(": 2}\n")
    more = read_new_lines(path, part.cursor)
    assert (more.lines, more.is_new) == ([{"step": 2, "a": 2}], False)
    assert read_new_lines(path, more.cursor).lines == []


def test_rewritten_metrics_of_a_resumed_run_replace_the_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    before = read_new_lines(path)
    (tmp_path / "new").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    os.replace(tmp_path / "new", path)
    part = read_new_lines(path, before.cursor)
    assert part.is_new
    assert len(part.lines) == 3
    assert read_new_lines(tmp_path / "none.jsonl").lines == []
