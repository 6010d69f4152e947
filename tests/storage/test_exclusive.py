"""Output is locked by one process, and the error of another process names it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from agent_loop.errors import OutputError
from agent_loop.storage.exclusive import exclusive_file, exclusive_folder

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
def test_the_process_that_holds_a_lock_is_named_and_loses_it_if_it_is_killed(
    tmp_path: Path, lock: Lock
) -> None:
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
