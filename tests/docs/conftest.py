"""The built site, and a browser without a network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def build_log() -> list[str]:
    """Build the site, and return what the build printed."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    result = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
    return result.stdout.splitlines()


@pytest.fixture(scope="session")
def site(build_log: list[str]) -> Path:
    return ROOT / "build" / "docs"


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Open a page on a narrow screen. The test fails if a script raises, or anything but a file is requested."""
    context = browser.new_context(viewport={"width": 400, "height": 900}, offline=True)
    page = context.new_page()
    errors: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    context.close()
    assert not errors
    assert [url for url in asked if not url.startswith(("file://", "data:", "blob:"))] == []
