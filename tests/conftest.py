"""Fixtures and settings of all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.viewer.browser import open_browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Start one browser for all tests that need one: Playwright runs once in a process."""
    with open_browser() as browser:
        yield browser


is_frozen = False
unfreeze = gc.unfreeze


def pytest_collection_finish() -> None:
    """Keep the garbage collector from the objects of imported modules and collected tests, millions that stay."""
    gc.unfreeze = note_unfreeze
    freeze()


def pytest_runtest_teardown() -> None:
    if not is_frozen:  # the test has trained, and a training unfreezes all objects at its end
        freeze()


def freeze() -> None:
    global is_frozen
    gc.freeze()
    is_frozen = True


def note_unfreeze() -> None:
    """Unfreeze all objects. `gc.get_freeze_count` would count them one by one after each test."""
    global is_frozen
    unfreeze()
    is_frozen = False
