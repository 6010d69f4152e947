"""Trajectories are stored during training, and a failed write does not stop the run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from agent_loop.storage import StoredRun
from agent_loop.storage.writer import TrajectoryKeeper, write_trajectories
from tests.helpers import small_tokenizer
from tests.storage.samples import solved


def kept(
    folder: Path, steps: Sequence[int], *, num_steps: int | None = None
) -> tuple[TrajectoryKeeper, list[str]]:
    reports: list[str] = []
    with TrajectoryKeeper(folder, num_steps=num_steps, report=reports.append) as keeper:
        for step in steps:
            keeper.keep([solved()], step=step, split="train", weight_version=step - 1)
            keeper.keep([solved()], step=step, split="val", weight_version=step)
    return keeper, reports


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "trajectories").iterdir())


def test_each_step_has_its_files_once_the_run_is_over(tmp_path: Path) -> None:
    keeper, reports = kept(tmp_path, [1, 2])
    assert names(tmp_path) == [f"{s}-{n:06d}.parquet" for s in ("train", "val") for n in (1, 2)]
    assert (keeper.num_failed, reports) == (0, [])


def test_only_the_newest_steps_stay(tmp_path: Path) -> None:
    kept(tmp_path, [1, 2, 3], num_steps=2)
    assert [file.step for file in StoredRun(tmp_path).files()] == [2, 2, 3, 3]


def test_zero_steps_writes_no_files(tmp_path: Path) -> None:
    kept(tmp_path, [1], num_steps=0)
    assert list(tmp_path.iterdir()) == []


def test_the_vocabulary_is_written_next_to_the_trajectories(tmp_path: Path) -> None:
    with TrajectoryKeeper(tmp_path) as keeper:
        keeper.keep_vocabulary(small_tokenizer())
        keeper.keep([solved()], step=1, split="train", weight_version=0)
    assert StoredRun(tmp_path).vocabulary()[2] == "<|im_end|>"


def test_a_file_in_the_place_of_the_folder_is_counted_and_reported_once(tmp_path: Path) -> None:
    (tmp_path / "trajectories").write_text("not a folder", encoding="utf-8")
    keeper, reports = kept(tmp_path, [1, 2])
    assert keeper.num_failed == 4
    assert [report.partition(":")[0] for report in reports] == [
        "trajectories cannot be written",
        "trajectories",
    ]
    assert "FileExistsError" in reports[0]


class _SlowTokenizer:
    """Tokenizer that returns its vocabulary after an event is set."""

    added_tokens_decoder: ClassVar[dict[int, str]] = {}

    def __init__(self, is_released: threading.Event) -> None:
        self._is_released = is_released

    def get_vocab(self) -> dict[str, int]:
        assert self._is_released.wait(30)
        return {}


def test_a_keyboard_interrupt_does_not_wait_for_pending_writes(tmp_path: Path) -> None:
    reports: list[str] = []
    is_released = threading.Event()
    with pytest.raises(KeyboardInterrupt), TrajectoryKeeper(tmp_path, report=reports.append) as keeper:
        keeper.keep_vocabulary(_SlowTokenizer(is_released))
        raise KeyboardInterrupt
    is_released.set()
    assert reports[-1] == "trajectories: 1 in total were not written"


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "train-000001.parquet"
    write_trajectories(path, [solved()], step=1, split="train")
    before = path.read_bytes()
    with pytest.raises(AttributeError):
        write_trajectories(path, [solved(), None], step=1, split="train")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
