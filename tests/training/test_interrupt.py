"""The first Ctrl-C requests an interrupt, the second raises `KeyboardInterrupt`."""

from __future__ import annotations

import asyncio
import signal

import pytest

from agent_loop.training.run import Interrupt


def test_the_first_sigint_cancels_the_call_and_the_second_raises_at_once() -> None:
    events: list[str] = []

    async def interrupted() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            events.append("cancelled")

    async def scenario() -> None:
        interrupt = Interrupt()
        with interrupt.listening():
            assert await interrupt.unless_requested(interrupted()) is None
            assert await interrupt.unless_requested(asyncio.sleep(60)) is None
            assert interrupt.is_requested
            events.append("continued")
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(scenario())
    assert events == ["cancelled", "continued"]
