from __future__ import annotations

import asyncio
import signal

import pytest

from agent_loop.runtime.event_loop import run_to_end
from agent_loop.runtime.isolated_task import num_abandoned

GRACE_S = 0.05


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

    task = run_to_end(main(), grace_s=GRACE_S)
    assert not task.done()
    assert num_abandoned() == 0  # the task's event loop is closed
    task.get_coro().close()
