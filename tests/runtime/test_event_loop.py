from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest

from agent_loop.runtime.event_loop import run_to_end
from agent_loop.runtime.isolated_task import num_abandoned

GRACE_S = 0.05


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_error_in_a_callback_does_not_end_the_event_loop(error: BaseException) -> None:
    async def main() -> str:
        asyncio.get_running_loop().call_soon(partial(_raise, error))
        await asyncio.sleep(0.01)
        return "ended"

    assert run_to_end(main()) == "ended"


def test_system_exit_in_a_task_does_not_end_the_event_loop() -> None:
    async def exits() -> None:
        raise SystemExit(3)

    async def main() -> str:
        task = asyncio.create_task(exits())
        await asyncio.wait({task})
        assert isinstance(task.exception(), SystemExit)
        return "ended"

    assert run_to_end(main()) == "ended"


def test_a_call_of_stop_does_not_end_the_event_loop() -> None:
    async def main() -> str:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        return "ended"

    assert run_to_end(main()) == "ended"


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


def test_a_hanging_thread_of_the_default_executor_does_not_keep_the_event_loop_open() -> None:
    released = threading.Event()

    async def main() -> str:
        asyncio.get_running_loop().run_in_executor(None, released.wait)
        await asyncio.sleep(0)
        return "ended"

    assert run_to_end(main(), grace_s=GRACE_S) == "ended"
    released.set()


SCRIPT = """
import asyncio, threading
from agent_loop.runtime.event_loop import exit_process, run_to_end

async def main():
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    await asyncio.sleep(0)

run_to_end(main(), grace_s=0.05)
print("done")
exit_process(3)
"""


def test_a_process_ends_although_a_thread_hangs() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (3, "done\n")
    assert "the process ends without them" in ended.stderr
