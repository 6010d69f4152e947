from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.viewer.browser import Viewer, viewing
from tests.viewer.synthetic import write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small run that no test changes."""
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Open a page. The test fails if one of the page's scripts raises or requests data from another host."""
    context = browser.new_context(viewport={"width": 1360, "height": 860}, color_scheme="light")
    page = context.new_page()
    errors: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if "Content Security" in message.text else None
    )
    page.on("request", lambda request: asked.append(request.url))
    yield page
    context.close()
    assert not errors
    local = ("http://127.0.0.1", "file://", "data:", "blob:")
    assert [url for url in asked if not url.startswith(local)] == []


@pytest.fixture(scope="session")
def small_viewer(run_folder: Path) -> Iterator[Viewer]:
    with viewing(run_folder) as viewer:
        yield viewer
