"""Ctrl-C asks first and insists the second time."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from agent_loop.training.interrupt import Interrupt


def test_the_first_sigint_cancels_what_may_be_abandoned_and_the_rest_goes_on() -> None:
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
            events.append("went on")
        assert interrupt.is_requested
        return events

    assert asyncio.run(scenario()) == ["cancelled", "went on"]


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


def test_the_handler_from_before_is_restored() -> None:
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


def test_off_the_main_thread_nothing_is_touched() -> None:
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


def test_a_timeout_of_the_bodys_own_is_not_swallowed() -> None:
    async def scenario() -> None:
        async with Interrupt().abandoning():
            raise TimeoutError("a tool's")

    with pytest.raises(TimeoutError, match="a tool's"):
        asyncio.run(scenario())
