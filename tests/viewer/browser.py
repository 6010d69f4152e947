"""Viewer in its own process, and its pages in a headless browser."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "from agent_loop.cli import main; main()", "view"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"


def browser_path() -> str:
    """Return the path of an installed browser; empty if there is none."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), "")


@dataclass(frozen=True)
class Viewer:
    """Running `agent-loop view`."""

    url: str
    process: subprocess.Popen[str]

    def stop(self, kind: int = signal.SIGINT) -> int:
        """Stop the viewer with a signal and return its exit code."""
        self.process.send_signal(kind)
        return self.process.wait(timeout=20)


@contextmanager
def viewing(run: Path, *arguments: str) -> Generator[Viewer]:
    """Serve a run on a free port until the body ends."""
    process = subprocess.Popen(
        [*COMMAND, str(run), "--no-open", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "500"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, line + process.stdout.read()
        yield Viewer("http://" + line.split("http://")[1].strip(), process)
    finally:
        process.kill()
        process.communicate()


def shoot(page: Any, name: str) -> None:
    """Save a screenshot of a page."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SCREENSHOTS / f"{name}.png"))
