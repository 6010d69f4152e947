"""The event loop of a process, and its garbage collections."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Iterator

import pytest

from agent_loop.runtime.event_loop import run_to_end
from agent_loop.runtime.garbage_collection import (
    OBJECTS_PER_COLLECTION,
    frozen_objects,
    infrequent_collections,
)
from agent_loop.runtime.isolated_task import num_abandoned


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("x")])
def test_an_error_of_the_main_coroutine_is_raised(error: BaseException) -> None:
    async def main() -> None:
        raise error

    with pytest.raises(type(error)):
        run_to_end(main())


def test_ctrl_c_cancels_the_main_coroutine_and_ends_the_event_loop() -> None:
    cancelled: list[bool] = []

    async def main() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(KeyboardInterrupt):
        run_to_end(main())
    assert cancelled == [True]


def test_a_task_that_swallows_its_cancellation_does_not_keep_the_event_loop_open() -> None:
    released: list[asyncio.Event] = []

    async def uncancellable() -> None:
        while not released[0].is_set():
            try:
                await released[0].wait()
            except asyncio.CancelledError:
                continue

    async def main() -> asyncio.Task[None]:
        released.append(asyncio.Event())
        task = asyncio.create_task(uncancellable())
        await asyncio.sleep(0)
        return task

    task = run_to_end(main(), grace_s=0.05)
    assert not task.done()
    assert num_abandoned() == 0  # the task's event loop is closed
    task.get_coro().close()


# -- garbage collections -----------------------------------------------------------------------------------------------


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
