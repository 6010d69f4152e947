"""Fixtures that run `agent-loop ...` in this process."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from agent_loop.cli import main
from tests.cli.project import ROOT, Command, Result, make_project


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `agent-loop ...` in the working directory, and checks its exit code."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str, exit_code: int = 0) -> Result:
        monkeypatch.setattr(sys, "argv", ["agent-loop", *arguments])
        found = 0
        try:
            main()
        except SystemExit as ended:
            found = int(ended.code or 0)
        captured = capsys.readouterr()
        assert found == exit_code, captured.out + captured.err
        return Result(captured.out, captured.err)

    return run


@pytest.fixture
def command(shell: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs `agent-loop ...` in a new project."""
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return shell


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new virtual environment with the package's wheel, as a user installs it outside the repository.

    The dependencies are those of this interpreter, so that nothing is downloaded.
    """
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, symlinks=True)
    base = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", vars=base, scheme="venv"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(ROOT)], check=True, cwd=folder)
    return folder
