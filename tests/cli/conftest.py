"""Fixtures that run `agent-loop ...` in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agent_loop.cli import main
from tests.cli.project import Command, Result, make_project


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `agent-loop ...` in the working directory."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["agent-loop", *arguments])
        exit_code = 0
        try:
            main()
        except SystemExit as ended:
            exit_code = int(ended.code or 0)
        captured = capsys.readouterr()
        return Result(exit_code, captured.out, captured.err)

    return run


@pytest.fixture
def command(shell: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs `agent-loop ...` in a new project."""
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return shell
