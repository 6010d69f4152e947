"""Tests that garbage collections are less frequent during rollouts only."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from agent_loop.runtime.garbage_collection import (
    OBJECTS_PER_COLLECTION,
    frozen_objects,
    infrequent_collections,
)


@pytest.fixture(autouse=True)
def usual_threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_the_threshold_is_raised_until_the_last_context_exits() -> None:
    first, second = infrequent_collections(), infrequent_collections()
    with first:
        second.__enter__()
    assert gc.get_threshold() == (OBJECTS_PER_COLLECTION, 10, 10)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


def test_objects_are_frozen_only_within_the_context() -> None:
    gc.unfreeze()
    with frozen_objects():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
