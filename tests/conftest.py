from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.viewer.browser import open_browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Start one browser for all tests that need one: Playwright runs once in a process."""
    with open_browser() as browser:
        yield browser
