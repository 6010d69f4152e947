from __future__ import annotations

import asyncio
import os
import threading

import pytest

from agent_loop.runtime.concurrency import run_together
from agent_loop.runtime.threads import OneThread, run_in_thread
from agent_loop.testing import run_virtual


def test_an_exception_in_a_thread_is_raised_in_the_caller() -> None:
    def fails() -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        run_virtual(run_in_thread(fails))


def test_hanging_functions_do_not_block_other_functions() -> None:
    release = threading.Event()

    async def main() -> None:
        hanging = [asyncio.ensure_future(run_in_thread(release.wait, 20)) for _ in range(40)]
        assert await run_together(run_in_thread(abs, -number) for number in range(40)) == list(range(40))
        assert not any(task.done() for task in hanging)
        release.set()
        await asyncio.wait(hanging)

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_starts_its_own_threads() -> None:
    asyncio.run(run_in_thread(abs, -1))
    pid = os.fork()
    if not pid:
        os._exit(0 if asyncio.run(run_in_thread(abs, -1)) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_one_thread_runs_functions_in_order_and_raises_their_errors() -> None:
    async def main() -> None:
        thread, idents = OneThread("test"), []

        def note(number: int) -> int:
            idents.append(threading.get_ident())
            if number == 2:
                raise KeyError(number)
            return number

        assert await run_together(thread.run(note, number) for number in (0, 1)) == [0, 1]
        with pytest.raises(KeyError):
            await thread.run(note, 2)
        assert await thread.run(note, 3) == 3
        thread.shutdown(wait=True)
        assert len(set(idents)) == 1
        assert threading.get_ident() not in idents

    run_virtual(main())


def test_a_call_queued_behind_a_hanging_one_can_be_cancelled() -> None:
    release = threading.Event()

    async def main() -> None:
        thread = OneThread("test")
        ran: list[int] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await thread.run(release.wait, 20)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await thread.run(ran.append, 1)
        release.set()
        await thread.run(ran.append, 2)
        thread.shutdown()
        assert ran == [2]

    asyncio.run(main())
