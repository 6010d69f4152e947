"""Trajectories are kept while a run trains, and what cannot be kept stops nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from agent_loop.storage import StoredRun
from agent_loop.storage import keeper as keeper_module
from agent_loop.storage.keeper import TrajectoryKeeper
from agent_loop.storage.writer import write_trajectories
from tests.helpers import small_tokenizer
from tests.storage.samples import solved

ROOT = Path(__file__).parents[2]


def kept(
    folder: Path, steps: Sequence[int], *, num_steps: int | None = None
) -> tuple[TrajectoryKeeper, list[str]]:
    said: list[str] = []
    with TrajectoryKeeper(folder, num_steps=num_steps, say=said.append) as keeper:
        for step in steps:
            keeper.keep([solved()], step=step, split="train", weight_version=step - 1)
            keeper.keep([solved()], step=step, split="val", weight_version=step)
    return keeper, said


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "trajectories").iterdir())


def test_each_step_has_its_files_once_the_run_is_over(tmp_path: Path) -> None:
    keeper, said = kept(tmp_path, [1, 2])
    assert names(tmp_path) == [f"{s}-{n:06d}.parquet" for s in ("train", "val") for n in (1, 2)]
    assert (keeper.num_failed, said) == (0, [])


def test_only_the_newest_steps_stay(tmp_path: Path) -> None:
    kept(tmp_path, [1, 2, 3], num_steps=2)
    assert [file.step for file in StoredRun(tmp_path).files()] == [2, 2, 3, 3]


def test_none_are_kept_where_none_are_wanted(tmp_path: Path) -> None:
    kept(tmp_path, [1], num_steps=0)
    assert list(tmp_path.iterdir()) == []


def test_the_vocabulary_is_kept_beside_them(tmp_path: Path) -> None:
    with TrajectoryKeeper(tmp_path) as keeper:
        keeper.keep_vocabulary(small_tokenizer())
        keeper.keep([solved()], step=1, split="train", weight_version=0)
    assert StoredRun(tmp_path).vocabulary()[2] == "<|im_end|>"


def test_a_folder_that_is_in_the_way_is_counted_and_said_once(tmp_path: Path) -> None:
    (tmp_path / "trajectories").write_text("not a folder", encoding="utf-8")
    keeper, said = kept(tmp_path, [1, 2])
    assert keeper.num_failed == 4
    assert len(said) == 1
    assert said[0].startswith("the train trajectories of step 1 cannot be kept: FileExistsError")


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    kept(tmp_path / "run", [1])
    shutil.rmtree(tmp_path / "run")
    keeper, _ = kept(tmp_path / "run", [2])
    assert keeper.num_failed == 0
    assert names(tmp_path / "run") == ["train-000002.parquet", "val-000002.parquet"]


def test_what_waits_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "MAX_WAITING_TOKENS", 9)
    said: list[str] = []
    with TrajectoryKeeper(tmp_path, say=said.append) as keeper:
        is_held = threading.Event()
        keeper.keep_vocabulary(_Slow(is_held))  # what the writer is busy with
        keeper.keep([solved()], step=1, split="train", weight_version=0)
        keeper.keep([solved()], step=2, split="train", weight_version=1)
        is_held.set()
    assert names(tmp_path) == ["train-000001.parquet"]
    assert said == [
        "the train trajectories of step 2 cannot be kept: writing takes longer than training; the run goes on, and "
        "says this once"
    ]


class _Slow:
    """A tokenizer that gives its vocabulary when it is told to."""

    added_tokens_decoder: ClassVar[dict[int, str]] = {}

    def __init__(self, may_go_on: threading.Event) -> None:
        self._may_go_on = may_go_on

    def get_vocab(self) -> dict[str, int]:
        assert self._may_go_on.wait(30)
        return {}


def test_on_a_full_disk_a_run_goes_on_and_earlier_files_stay(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.storage.full_disk", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    num_failed, said = json.loads(ran.stdout)
    assert num_failed == 2
    assert len(said) == 1
    assert "OSError" in said[0]
    assert names(tmp_path) == ["train-000001.parquet"]
    assert [file.num_trajectories for file in StoredRun(tmp_path).files()] == [1]


def test_whoever_is_in_a_hurry_does_not_wait_for_what_is_written(tmp_path: Path) -> None:
    said: list[str] = []
    may_go_on = threading.Event()
    with pytest.raises(KeyboardInterrupt), TrajectoryKeeper(tmp_path, say=said.append) as keeper:
        keeper.keep_vocabulary(_Slow(may_go_on))
        raise KeyboardInterrupt
    may_go_on.set()
    assert said == ["trajectories that were still being written are left out"]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "train-000001.parquet"
    write_trajectories(path, [solved()], step=1, split="train")
    before = path.read_bytes()
    with pytest.raises(AttributeError):
        write_trajectories(path, [solved(), None], step=1, split="train")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
