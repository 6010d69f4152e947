"""Puts the installed programs on the path, and gives workspaces a folder of their own."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.agents.programs import programs_folder

# One environment has all frameworks.
collect_ignore_glob = [] if find_spec("smolagents") else ["test_frameworks_*.py"]


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the programs first on `PATH`."""
    monkeypatch.setenv("PATH", f"{programs_folder()}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def workspaces_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which the workspaces of a test are made."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(root))
    monkeypatch.setenv("TMPDIR", str(root))
    return root
