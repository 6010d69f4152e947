"""Folders of workspaces whose paths are the same in a later process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from agent_loop.workspaces.factory import open_workspace
from agent_loop.workspaces.folder import make_folder, new_name, remove_orphaned_folders, root_folder


@pytest.fixture(autouse=True)
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "root"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "root"))


def names(folder: str | Path) -> list[str]:
    return [path.name for path in Path(folder).iterdir()]


def test_folders_with_the_same_key_have_the_same_path_one_after_the_other_and_never_at_once() -> None:
    async def scenario() -> None:
        async with open_workspace({}, key="ab12") as first:
            await first.exec(["touch", "file"])
            async with open_workspace({}, key="ab12") as second:
                assert second.folder != first.folder
                assert names(second.folder) == []
            assert names(first.folder) == ["file"]
        async with open_workspace({}, key="ab12") as again:
            assert again.folder == first.folder
            assert names(again.folder) == []
        async with open_workspace({}, key="ab13") as other:
            assert other.folder != first.folder
        assert names(root_folder()) == []

    asyncio.run(scenario())


def test_a_killed_process_leaves_its_path_to_the_next_one() -> None:
    code = """
import os
from agent_loop.workspaces.folder import make_folder, new_name
print(make_folder(new_name("ab12")), flush=True)
os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    stable = Path(killed.stdout.strip())
    assert stable.is_dir()
    assert make_folder(new_name("ab12")) != stable
    assert remove_orphaned_folders() == 1
    assert make_folder(new_name("ab12")) == stable
