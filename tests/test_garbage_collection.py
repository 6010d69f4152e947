"""The collector is slowed down while rollouts run, and only then."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from agent_loop.runtime.garbage_collection import (
    OBJECTS_PER_COLLECTION,
    frozen_objects,
    infrequent_collections,
)
from agent_loop.testing import run_virtual
from tests.helpers import text_reply, user
from tests.rollout.harness import WorkerHarness


@pytest.fixture(autouse=True)
def usual_threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_collections_are_rare_until_the_last_body_ends() -> None:
    first, second = infrequent_collections(), infrequent_collections()
    with first:
        second.__enter__()
    assert gc.get_threshold() == (OBJECTS_PER_COLLECTION, 10, 10)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("threshold", [0, 1_000_000])
def test_a_collector_that_is_off_or_slower_is_left_as_it_is(threshold: int) -> None:
    gc.set_threshold(threshold, 5, 5)
    with infrequent_collections():
        assert gc.get_threshold() == (threshold, 5, 5)
    assert gc.get_threshold() == (threshold, 5, 5)


def test_a_rollout_has_rare_collections_and_puts_them_back() -> None:
    seen: list[int] = []

    def answer(_: object) -> object:
        seen.append(gc.get_threshold()[0])
        return text_reply("hi")

    harness = WorkerHarness(answer)
    run_virtual(harness.worker.run(harness.jobs([{"raw_prompt": user("hi")}, {"raw_prompt": user("again")}])))
    assert seen == [OBJECTS_PER_COLLECTION] * 2
    assert gc.get_threshold()[0] == 700


def test_frozen_objects_are_left_alone_while_the_body_lasts() -> None:
    before = gc.get_freeze_count()
    with frozen_objects():
        assert gc.get_freeze_count() > before + 1000
    assert gc.get_freeze_count() == 0
