"""Trajectories are stored during training under a lock, and the documentation of what is stored is correct."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from agent_loop.errors import OutputError
from agent_loop.storage import StoredRun, write_trajectories, write_vocabulary
from agent_loop.storage.columns import SCHEMA
from agent_loop.storage.exclusive import exclusive_file, exclusive_folder
from agent_loop.storage.writer import TrajectoryKeeper
from tests.helpers import small_tokenizer
from tests.storage.samples import failed, solved


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
    first, total = reports
    assert first.startswith("trajectories cannot be written:")
    assert "FileExistsError" in first
    assert total.startswith("trajectories:")


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


PAGE = Path(__file__).parents[2] / "docs" / "trajectories.md"


def test_the_page_lists_every_column() -> None:
    page = PAGE.read_text(encoding="utf-8")
    columns = re.findall(r"^\| `(\w+)` \| `(.*?)` \| .+ \|$", page, flags=re.MULTILINE)
    assert columns == [(field.name, str(field.type)) for field in SCHEMA]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs" / "train"
    for step in (1, 12):
        for split in ("train", "val"):
            path = folder / "trajectories" / f"{split}-{step:06d}.parquet"
            write_trajectories(path, [solved(), failed()], step=step, split=split)
    write_vocabulary(folder / "vocabulary.json", small_tokenizer())
    monkeypatch.chdir(tmp_path)
    return folder


def code(language: str, number: int) -> str:
    blocks = PAGE.read_text(encoding="utf-8").split(f"```{language}\n")[1:]
    return blocks[number].split("```")[0]


def test_the_queries_of_the_page_run(run: Path) -> None:
    import duckdb  # late: only this test needs it

    first, second, _ = code("sql", 0).split(";")
    assert sorted(duckdb.sql(first).fetchall()) == [
        (1, "answered", 1, 0.1),
        (1, "failed", 1, None),
        (12, "answered", 1, 0.1),
        (12, "failed", 1, None),
    ]
    assert duckdb.sql(second).fetchall()[0] == ("group=0/rollout=0", "4", "4", "4")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_programs_of_the_page_run(run: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(run / "cache"))
    program = code("python", number).replace("group=3/rollout=1", "group=0/rollout=0")
    program = program.replace('load_dataset("parquet", ', f'load_dataset("parquet", cache_dir={str(run)!r}, ')
    exec(compile(program, str(PAGE), "exec"), {})


def test_json_columns_are_strict(run: Path) -> None:
    def fail(name: str) -> None:
        raise AssertionError(name)

    for row in StoredRun(run).rows():
        for name in ("row", "messages", "feedback", "incidents", "metrics", "reward_extra", "extra_fields"):
            json.loads(row[name], parse_constant=fail)


HOLD = """
import os
import sys
from pathlib import Path
from agent_loop.storage import exclusive
if len(sys.argv) > 3:
    os.setuid(int(sys.argv[3]))
with getattr(exclusive, sys.argv[1])(Path(sys.argv[2]), name="--out"):
    print("held", flush=True)
    sys.stdin.read()
"""
Lock = Callable[..., AbstractContextManager[None]]
LOCKS = pytest.mark.parametrize("lock", [exclusive_folder, exclusive_file])


@contextmanager
def held_elsewhere(lock: Lock, path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, lock.__name__, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@LOCKS
def test_the_process_that_holds_a_lock_is_named_and_loses_it_when_killed(tmp_path: Path, lock: Lock) -> None:
    path = tmp_path / "run"
    with held_elsewhere(lock, path) as process:
        holder = f"--out is {str(path)!r}, which another run is writing: process {process.pid} on"
        with pytest.raises(OutputError) as refused, lock(path, name="--out"):
            pass
        assert holder in str(refused.value)
        assert f"-c {lock.__name__}" in str(refused.value)
        process.kill()
        process.wait()
        with lock(path, name="--out"):
            pass


@LOCKS
def test_two_runs_of_one_process_exclude_each_other_too(tmp_path: Path, lock: Lock) -> None:
    path = tmp_path / "run"
    refused = pytest.raises(OutputError, match=f"process {os.getpid()}")
    with lock(path, name="the journal"), refused, lock(path, name="the journal"):
        pass
    with lock(path, name="the journal"):
        pass


def test_a_new_folder_that_stays_empty_is_removed(tmp_path: Path) -> None:
    with exclusive_folder(tmp_path / "new", name="--out"):
        assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new").exists()
    with exclusive_folder(tmp_path / "kept", name="--out"):
        (tmp_path / "kept" / "result").touch()
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [".lock", "result"]


def test_paths_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    for lock, path, complaint in (
        (exclusive_folder, tmp_path / "file", "which is a file; give a folder"),
        (exclusive_folder, tmp_path / "file" / "run", "cannot be written or locked"),
        (exclusive_file, tmp_path, "which is a folder; give a file in it"),
        (exclusive_file, tmp_path / "link", "which is a device, pipe or symbolic link"),
        (exclusive_file, tmp_path / "pipe", "which is a device, pipe or symbolic link"),
        (exclusive_file, Path("/proc/out.jsonl"), "cannot be written or locked"),
    ):
        with pytest.raises(OutputError, match=complaint), lock(path, name="--out"):
            pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_folder_of_another_user_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    command = [sys.executable, "-c", HOLD, "exclusive_folder", str(tmp_path), "65534"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert "OutputError" in done.stderr
    assert "PermissionError" in done.stderr
