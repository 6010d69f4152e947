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
HEADLESS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run
    --disable-background-networking --disable-component-update --disable-sync
"""
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"


@contextmanager
def open_browser() -> Generator[Any]:
    """Start a headless browser until the body ends."""
    from playwright.sync_api import sync_playwright  # late: needed by the tests with a browser alone

    path = next((path for name in BROWSERS if (path := shutil.which(name))), "")
    assert path, "no browser is installed; `make install-browser` installs one"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=HEADLESS.split())
        yield browser
        browser.close()


def serious_faults(page: Any) -> list[tuple[str, str, list[str]]]:
    """Return the serious accessibility violations of a page: rule, impact and the first elements."""
    from axe_playwright_python.sync_playwright import Axe  # late: as above

    return [
        (fault["id"], fault["impact"], [node["html"][:200] for node in fault["nodes"]][:3])
        for fault in Axe().run(page).response["violations"]
        if fault["impact"] in ("serious", "critical")
    ]


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
