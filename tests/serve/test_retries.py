"""Tests that retries get the same completion, and that other repeated requests get a new sample."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import openai
import pytest

from agent_loop.episode.limits import EpisodeLimits
from agent_loop.loops.base import LoopContext
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.completions import ReplyChunk
from agent_loop.serve.session import Session
from agent_loop.serve.shared_completion import RetryInfo
from agent_loop.testing import run_virtual
from agent_loop.trajectory import IncidentKind
from agent_loop.types import StopReason
from tests.helpers import hermes_template, text_reply, tool_call_reply, user
from tests.serve.harness import ADD, MODEL, ProgramHarness, client_of, in_order, origins

FIRST_TRY = {"x-stainless-retry-count": "0"}
RETRY = {"x-stainless-retry-count": "1"}


def test_a_retry_of_a_completed_request_gets_the_same_completion() -> None:
    async def program(create: Any) -> None:
        first = await create(model=MODEL, messages=user("?"), tools=[ADD], extra_headers=FIRST_TRY)
        again = await create(model=MODEL, messages=user("?"), tools=[ADD], extra_headers=RETRY)
        assert again == first
        keyed = [
            await create(model=MODEL, messages=user("?"), extra_headers={"idempotency-key": "k"})
            for _ in range(2)
        ]
        assert keyed[0] == keyed[1]

    harness = ProgramHarness(in_order(tool_call_reply("add", a=1, b=2)))
    assert len(harness.run_virtual(program)) == 2
    assert len(harness.server.requests) == 2


def test_a_retry_joins_the_completion_in_flight() -> None:
    async def program(create: Any) -> None:
        first = asyncio.ensure_future(create(model=MODEL, messages=user("?")))
        await asyncio.sleep(1)
        retry = asyncio.ensure_future(create(model=MODEL, messages=user("?"), extra_headers=RETRY))
        await asyncio.sleep(1)
        first.cancel()
        assert (await retry).choices[0].message.content == "slow"

    harness = ProgramHarness(in_order(text_reply("slow", latency_s=5)))
    [trajectory] = harness.run_virtual(program)
    assert len(harness.server.requests) == 1
    assert trajectory.output.answer == "slow"


def test_a_retry_of_one_of_several_samples_gets_its_own_sample() -> None:
    async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        client = client_of(base_url, api_key, http_client, max_retries=1)

        async def sample() -> str:
            reply = await client.chat.completions.create(model=MODEL, messages=user("?"))
            return str(reply.choices[0].message.content)

        async with asyncio.TaskGroup() as group:
            samples = [group.create_task(sample()) for _ in range(3)]
        assert sorted(sample.result() for sample in samples) == ["b", "c", "d"]

    harness = ProgramHarness(
        in_order(text_reply("", error="out of memory"), text_reply("b"), text_reply("c"), text_reply("d"))
    )
    trajectories = harness.run_virtual(program)
    assert sorted(t.output.answer for t in trajectories) == ["b", "c", "d"]


def test_a_client_that_disconnects_aborts_the_completion_and_may_retry() -> None:
    async def program(create: Any) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await create(model=MODEL, messages=user("?"))
        await create(model=MODEL, messages=user("?"), extra_headers=RETRY)

    slow = text_reply("one two three four five", latency_s=10)
    harness = ProgramHarness(in_order(slow, text_reply("quick")))
    cut, good = harness.run_virtual(program)
    assert cut.output.stop_reason is StopReason.CANCELLED
    assert 0 < len(cut.output.response_ids) < len(slow.token_ids)
    assert (good.output.stop_reason, good.output.answer) == (StopReason.ANSWERED, "quick")


def test_a_server_failure_is_a_typed_error_and_the_retry_continues_the_conversation() -> None:
    async def program(create: Any) -> None:
        first = (await create(model=MODEL, messages=user("?"))).choices[0].message
        history = [*user("?"), first, *user("more")]
        with pytest.raises(openai.InternalServerError) as caught:
            await create(model=MODEL, messages=history)
        assert (caught.value.status_code, caught.value.body["type"]) == (503, "server_error")
        await create(model=MODEL, messages=history, extra_headers=RETRY)

    harness = ProgramHarness(
        in_order(text_reply("x"), text_reply("", error="out of memory"), text_reply("y"))
    )
    [trajectory] = harness.run_virtual(program)
    assert origins(trajectory.output) == ["prompt", "model", "interaction", "model"]
    assert trajectory.output.answer == "y"
    [incident] = trajectory.output.incidents
    assert incident.kind is IncidentKind.FAILED_REQUEST
    assert "out of memory" in incident.detail


def test_the_memory_of_a_session_grows_linearly_with_its_turns() -> None:
    harness = ProgramHarness(in_order(text_reply("ok")))
    limits = EpisodeLimits(prompt_length=10**7, response_length=10**7)
    context = LoopContext(server_manager=harness.manager, template=hermes_template(), limits=limits)

    async def main(num_turns: int) -> int:
        tracemalloc.start()
        async with Session(context) as session:
            messages: list[Any] = []
            for number in range(num_turns):
                messages += user(f"{number} " + 200 * "so many words ")
                body = json.loads(
                    json.dumps({"model": MODEL, "messages": messages})
                )  # as each request brings it
                request = ChatCompletionRequest.read(body)
                chunks = [chunk async for chunk in session.submit(request, retry=RetryInfo())]
                messages.append({"role": "assistant", "content": ReplyChunk.joined(chunks).delta.content})
            harness.server.requests.clear()
            num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return num_bytes

    run_virtual(main(2))
    assert run_virtual(main(24)) < 2.5 * run_virtual(main(12))
