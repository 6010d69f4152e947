"""The package as a user installs it: from a wheel, in a virtual environment outside the repository."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new virtual environment with the package's wheel.

    The dependencies are those of this interpreter, so that nothing is downloaded.
    """
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, symlinks=True)
    packages = Path(
        sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}, scheme="venv")
    )
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", str(ROOT)]
    subprocess.run(pip, check=True, cwd=folder)
    return folder


def run_line(line: str, *, cwd: Path, installed: Path, status: int = 0) -> str:
    """Run a command line of the installed package, and return its output."""
    words = shlex.split(line)
    assert words[0] == "agent-loop"
    done = subprocess.run(
        [str(installed / "bin" / words[0]), *words[1:]],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, line + done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
