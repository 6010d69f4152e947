"""Completions and programs that take too long."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from agent_loop.trajectory import IncidentKind
from agent_loop.types import StopReason
from tests.helpers import text_reply, user
from tests.serve.harness import MODEL, ProgramHarness, in_order, origins


@pytest.mark.parametrize("quick_turns", [0, 1])
def test_a_completion_that_takes_too_long_ends_its_conversation_and_keeps_the_tokens(
    quick_turns: int,
) -> None:
    async def program(create: Any) -> None:
        messages: list[Any] = user("?")
        for _ in range(quick_turns):
            messages = [
                *messages,
                (await create(model=MODEL, messages=messages)).choices[0].message,
                *user("!"),
            ]
        began = asyncio.get_running_loop().time()
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model=MODEL, messages=messages)
        assert caught.value.code == "deadline"
        assert asyncio.get_running_loop().time() - began == 5

    slow = text_reply("one two three", latency_s=10)
    harness = ProgramHarness(in_order(*[text_reply("quick")] * quick_turns, slow), generate_timeout_s=5)
    [trajectory] = harness.run_virtual(program)
    assert trajectory.output.stop_reason is StopReason.DEADLINE
    assert origins(trajectory.output)[-1] == "model"
    assert 0 < len(trajectory.output.segments[-1]) < len(slow.token_ids)
    kinds = [incident.kind for incident in trajectory.output.incidents]
    assert kinds == [IncidentKind.CUT_TURN, IncidentKind.GENERATE_TIMEOUT, IncidentKind.FAILED_REQUEST]


def test_a_program_that_ignores_its_cancellation_gets_no_further_turn() -> None:
    refusals: list[str | None] = []

    async def program(create: Any) -> float:
        while len(refusals) < 3:
            try:
                await create(model=MODEL, messages=user("?"))
            except openai.APIStatusError as error:
                refusals.append(error.code)
            except asyncio.CancelledError:
                continue
        return 1.0

    harness = ProgramHarness(in_order(text_reply("x", latency_s=3)), deadline_s=10)
    trajectories = harness.run_virtual(program)
    assert refusals == ["deadline"] * 3
    assert len(harness.server.requests) == 4
    assert {t.output.stop_reason for t in trajectories} == {StopReason.DEADLINE}
    assert all(t.reward is None for t in trajectories)
