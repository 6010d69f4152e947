"""The first Ctrl-C requests an interrupt, the second raises `KeyboardInterrupt`."""

from __future__ import annotations

import asyncio
import signal

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
