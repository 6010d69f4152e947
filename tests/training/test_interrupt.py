"""The first Ctrl-C requests an interrupt, the second raises `KeyboardInterrupt`."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from agent_loop.training.interrupt import Interrupt


def test_the_first_sigint_cancels_the_abandoning_block_and_execution_continues_after_it() -> None:
    async def scenario() -> list[str]:
        interrupt = Interrupt()
        events: list[str] = []
        with interrupt.listening():
            async with interrupt.abandoning():
                try:
                    signal.raise_signal(signal.SIGINT)
                    await asyncio.Event().wait()
                finally:
                    events.append("cancelled")
                events.append("never reached")
            async with interrupt.abandoning():
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            events.append("continued")
        assert interrupt.is_requested
        return events

    assert asyncio.run(scenario()) == ["cancelled", "continued"]


def test_the_second_sigint_raises_at_once() -> None:
    async def scenario() -> None:
        interrupt = Interrupt()
        with interrupt.listening():
            async with interrupt.abandoning():
                signal.raise_signal(signal.SIGINT)
                await asyncio.Event().wait()
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(scenario())


def test_the_previous_handler_is_restored() -> None:
    def handler(number: int, frame: object) -> None: ...

    async def scenario() -> None:
        before = signal.getsignal(signal.SIGINT)
        with Interrupt().listening():
            assert signal.getsignal(signal.SIGINT) is not before
        assert signal.getsignal(signal.SIGINT) is before

    previous = signal.signal(signal.SIGINT, handler)
    try:
        asyncio.run(scenario())
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, previous)


def test_no_handler_is_installed_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGINT)
    failures: list[BaseException] = []

    async def scenario() -> None:
        with Interrupt().listening():
            pass

    def work() -> None:
        try:
            asyncio.run(scenario())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert failures == []
    assert signal.getsignal(signal.SIGINT) is before


def test_a_timeout_raised_in_the_body_is_not_swallowed() -> None:
    async def scenario() -> None:
        async with Interrupt().abandoning():
            raise TimeoutError("a tool's")

    with pytest.raises(TimeoutError, match="a tool's"):
        asyncio.run(scenario())
