"""Tests of the ends of programs and completions: limits, deadlines, errors, disconnecting clients and their retries."""

from __future__ import annotations

import asyncio
import json
import math
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
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import IncidentKind
from agent_loop.types import StopReason
from tests.helpers import hermes_template, text_reply, tool_call_reply, user
from tests.serve.harness import (
    ADD,
    MODEL,
    ProgramHarness,
    client_of,
    echo,
    in_order,
    job,
    origins,
    run_one,
)

pytestmark = pytest.mark.virtual_time

RETRY = {"x-stainless-retry-count": "1"}


async def never_ends(create: Any) -> None:
    """Send requests until one is refused."""
    messages: list[Any] = user("1 + 2?")
    while True:
        reply = (await create(model=MODEL, messages=messages, tools=[ADD])).choices[0].message
        answers = [{"role": "tool", "tool_call_id": c.id, "content": "3"} for c in reply.tool_calls or ()]
        messages = [*messages, echo(reply), *(answers or user("more"))]


async def asks_once(create: Any) -> None:
    await create(model=MODEL, messages=user("?"))


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_turn_limit_ends_the_program_without_a_failure() -> None:
    call = tool_call_reply("add", a=1, b=2)
    harness = ProgramHarness(in_order(call), max_assistant_turns=2, reward=lambda o, row: 0.25)
    [trajectory] = harness.run_virtual(never_ends)
    output = trajectory.output
    assert (output.stop_reason, output.failure) == (StopReason.MAX_ASSISTANT_TURNS, None)
    assert (trajectory.reward, output.num_assistant_turns) == (0.25, 2)
    assert [i.kind for i in output.incidents] == [IncidentKind.FAILED_REQUEST]


def test_the_length_limit_cuts_the_completion_and_refuses_the_next_request() -> None:
    async def program(create: Any) -> None:
        reply = await create(model=MODEL, messages=user("?"))
        assert reply.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model=MODEL, messages=[*user("?"), reply.choices[0].message, *user("more")])
        assert caught.value.code == "context_length_exceeded"

    output = run_one(program, "one two three four five six", response_length=5)
    assert (output.stop_reason, len(output.response_ids)) == (StopReason.RESPONSE_LENGTH, 5)


def test_a_prompt_that_is_too_long_is_refused_and_recorded() -> None:
    async def program(create: Any) -> None:
        await create(model=MODEL, messages=user("?" * 99))

    assert run_one(program, "x", prompt_length=20).stop_reason is StopReason.PROMPT_LENGTH


def test_the_number_of_conversations_is_limited() -> None:
    async def program(create: Any) -> None:
        for number in range(100):
            await create(model=MODEL, messages=user(str(number)))

    trajectories = ProgramHarness(in_order("x")).run_virtual(program)
    assert len(trajectories) == 64
    [incident] = trajectories[0].output.incidents
    assert "max_branches" in incident.detail
    assert all(t.output.failure is None for t in trajectories)


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_the_deadline_cancels_program_and_completion_and_keeps_the_tokens() -> None:
    slow = text_reply("one two three four five six seven", latency_s=20)
    output = run_one(never_ends, tool_call_reply("add", a=1, b=2), slow, deadline_s=10)
    assert output.stop_reason is StopReason.DEADLINE
    assert origins(output) == ["prompt", "model", "tool", "model"]
    assert 0 < len(output.segments[-1]) < len(slow.token_ids)


@pytest.mark.parametrize("quick_turns", [0, 1])
def test_a_completion_that_takes_too_long_ends_its_conversation_and_keeps_the_tokens(
    quick_turns: int,
) -> None:
    async def program(create: Any) -> None:
        messages: list[Any] = user("?")
        for _ in range(quick_turns):
            reply = (await create(model=MODEL, messages=messages)).choices[0].message
            messages = [*messages, reply, *user("!")]
        began = asyncio.get_running_loop().time()
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model=MODEL, messages=messages)
        assert caught.value.code == "deadline"
        assert asyncio.get_running_loop().time() - began == 5

    slow = text_reply("one two three", latency_s=10)
    output = run_one(program, *["quick"] * quick_turns, slow, generate_timeout_s=5)
    assert output.stop_reason is StopReason.DEADLINE
    assert origins(output)[-1] == "model"
    assert 0 < len(output.segments[-1]) < len(slow.token_ids)
    kinds = [incident.kind for incident in output.incidents]
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
    assert {(t.output.stop_reason, t.reward) for t in trajectories} == {(StopReason.DEADLINE, None)}


# -- failures and cancellation -----------------------------------------------------------------------------------------


def test_a_program_that_raises_fails_alone_with_its_traceback_and_its_tokens() -> None:
    async def broken(create: Any) -> None:
        await asks_once(create)
        raise KeyError("nowhere")

    async def sound(create: Any) -> dict[str, Any]:
        await asks_once(create)
        return {"reward": 1, "steps": 3}

    failed, good = ProgramHarness(in_order("x")).run_virtual(broken, sound)
    assert failed.output.stop_reason is StopReason.FAILED
    assert "KeyError: 'nowhere'" in failed.output.failure.error
    assert "in broken" in failed.output.failure.traceback
    assert origins(failed.output) == ["prompt", "model"]
    assert (good.reward, good.output.extra_fields) == (1.0, {"steps": 3})


def test_a_program_without_a_request_and_one_that_returns_no_reward_fail_with_the_reason() -> None:
    async def idle(row: Any) -> float:
        return 1.0

    async def odd(create: Any) -> str:
        await asks_once(create)
        return "good"

    failures = [t.output.failure.error for t in ProgramHarness(in_order("x")).run_virtual(idle, odd)]
    assert "make it use the base URL" in failures[0]
    assert "the program returned 'good' (str)" in failures[1]


async def test_a_cancelled_trajectory_keeps_all_its_conversations() -> None:
    harness = ProgramHarness(in_order("a", text_reply("one two three four five", latency_s=100)))

    async def program(create: Any) -> None:
        await create(model=MODEL, messages=user("first"))
        await create(model=MODEL, messages=user("second"))

    loop = asyncio.get_running_loop()
    loop.call_later(50, harness.worker.cancel, "group=0/rollout=0")
    first, second = await harness.run(program)
    assert [t.output.stop_reason for t in (first, second)] == [StopReason.CANCELLED] * 2
    assert origins(second.output) == ["prompt", "model"]


async def test_requests_in_flight_when_the_program_ends_are_aborted() -> None:
    kept: list[asyncio.Future[Any]] = []

    async def program(create: Any) -> float:
        kept.append(asyncio.ensure_future(asks_once(create)))
        await asyncio.sleep(1)
        return 1.0

    harness = ProgramHarness(in_order(text_reply("one two three", latency_s=math.inf)))
    [trajectory] = await harness.worker.run([job(program)])
    with pytest.raises(openai.APIStatusError):
        await kept[0]
    harness.assert_nothing_is_left()
    assert trajectory.output.stop_reason is StopReason.CANCELLED


async def test_a_program_whose_only_server_dies_fails_with_its_reason() -> None:
    server = ScriptedServer(in_order(text_reply("one two three", latency_s=10)), streams=True)
    asyncio.get_running_loop().call_later(5, server.die)
    [trajectory] = await ProgramHarness([server]).worker.run([job(asks_once)])
    assert trajectory.output.stop_reason is StopReason.FAILED
    assert "InternalServerError" in trajectory.output.failure.error
    assert "the engine was killed" in trajectory.output.failure.error


# -- retries -----------------------------------------------------------------------------------------------------------


def test_a_retry_of_a_completed_request_gets_the_same_completion() -> None:
    async def program(create: Any) -> None:
        first = await create(model=MODEL, messages=user("?"), tools=[ADD])
        assert await create(model=MODEL, messages=user("?"), tools=[ADD], extra_headers=RETRY) == first
        keyed = [
            await create(model=MODEL, messages=user("?"), extra_headers={"idempotency-key": "k"})
            for _ in range(2)
        ]
        assert keyed[0] == keyed[1]

    harness = ProgramHarness(in_order(tool_call_reply("add", a=1, b=2)))
    assert len(harness.run_virtual(program)) == len(harness.server.requests) == 2


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
        create = client_of(base_url, api_key, http_client, max_retries=1).chat.completions.create
        async with asyncio.TaskGroup() as group:
            samples = [group.create_task(create(model=MODEL, messages=user("?"))) for _ in range(3)]
        assert sorted(each.result().choices[0].message.content for each in samples) == ["b", "c", "d"]

    replies = in_order(text_reply("", error="out of memory"), "b", "c", "d")
    trajectories = ProgramHarness(replies).run_virtual(program)
    assert sorted(t.output.answer for t in trajectories) == ["b", "c", "d"]


def test_a_client_that_disconnects_aborts_the_completion_and_may_retry() -> None:
    async def program(create: Any) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await create(model=MODEL, messages=user("?"))
        await create(model=MODEL, messages=user("?"), extra_headers=RETRY)

    slow = text_reply("one two three four five", latency_s=10)
    cut, good = ProgramHarness(in_order(slow, "quick")).run_virtual(program)
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

    output = run_one(program, "x", text_reply("", error="out of memory"), "y")
    assert origins(output) == ["prompt", "model", "interaction", "model"]
    assert output.answer == "y"
    [incident] = output.incidents
    assert incident.kind is IncidentKind.FAILED_REQUEST
    assert "out of memory" in incident.detail


def test_the_memory_of_a_session_grows_linearly_with_its_turns() -> None:
    harness = ProgramHarness(in_order("ok"))
    limits = EpisodeLimits(prompt_length=10**7, response_length=10**7)
    context = LoopContext(server_manager=harness.manager, template=hermes_template(), limits=limits)

    async def main(num_turns: int) -> int:
        tracemalloc.start()
        async with Session(context) as session:
            messages: list[Any] = []
            for number in range(num_turns):
                messages += user(f"{number} " + 200 * "so many words ")
                # A copy, as each request brings it.
                body = json.loads(json.dumps({"model": MODEL, "messages": messages}))
                request = ChatCompletionRequest.read(body)
                chunks = [chunk async for chunk in session.submit(request, retry=RetryInfo())]
                messages.append({"role": "assistant", "content": ReplyChunk.joined(chunks).delta.content})
            harness.server.requests.clear()
            num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return num_bytes

    run_virtual(main(2))
    assert run_virtual(main(24)) < 2.5 * run_virtual(main(12))
