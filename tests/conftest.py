"""What all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.viewer.browser import open_browser

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Threads of torch in each process: the workers of pytest and what they start keep all cores busy."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Start one browser for all tests that need one: Playwright runs once in a process."""
    with open_browser() as browser:
        yield browser


def pytest_collection_finish() -> None:
    freeze_modules()


def pytest_runtest_teardown() -> None:
    if not gc.get_freeze_count():  # the test has trained, and a training unfreezes all objects at its end
        freeze_modules()


def freeze_modules() -> None:
    """Keep the garbage collector from the objects of imported modules and collected tests, millions that stay."""
    gc.freeze()
