"""Fixtures and settings of all tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from agent_loop.testing import run_virtual
from tests.harness import is_nightly
from tests.viewer.browser import open_browser

# A shell ignores SIGINT in commands that it starts in the background, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Two workers with one thread each are faster than threads that wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("small", max_examples=20, deadline=None)
settings.register_profile("full", max_examples=100, deadline=None)
settings.load_profile("small")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Start one browser for all tests that need one: Playwright runs once in a process."""
    with open_browser() as browser:
        yield browser


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked `nightly`, except for `keep` cases of each, which are drawn by the test's name."""
    if is_nightly():
        return
    cases: defaultdict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("nightly"):
            is_slow = item.get_closest_marker("slow") is not None
            cases[item.nodeid.partition("[")[0], is_slow].append(item)
    left_out: set[pytest.Item] = set()
    for (name, _), of_test in cases.items():
        keep = of_test[0].get_closest_marker("nightly").kwargs.get("keep", 0)
        if len(of_test) > keep:
            left_out |= set(of_test) - set(random.Random(name).sample(of_test, keep))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test on an event loop, in virtual time if the test or its module is marked so."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    run = run_virtual if pyfuncitem.get_closest_marker("virtual_time") else asyncio.run
    run(test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}))
    return True


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
