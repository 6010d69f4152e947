"""Tests of the ends of programs: limits, deadlines, errors, retries and disconnecting clients."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest

from agent_loop.servers.scripted import ScriptedServer
from agent_loop.trajectory import IncidentKind
from agent_loop.types import StopReason
from tests.helpers import encoded, text_reply, tool_call_reply, user
from tests.serve.harness import ADD, MODEL, ProgramHarness, client_of, echo, in_order, job, origins

pytestmark = pytest.mark.virtual_time


async def never_ends(create: Any) -> None:
    """Send requests until one is refused."""
    messages: list[Any] = user("1 + 2?")
    while True:
        reply = (await create(model=MODEL, messages=messages, tools=[ADD])).choices[0].message
        answers = [
            {"role": "tool", "tool_call_id": c.id, "content": "3"} for c in reply.tool_calls or ()
        ] or user("more")
        messages = [*messages, echo(reply), *answers]


def test_a_turn_limit_ends_the_program_without_a_failure() -> None:
    harness = ProgramHarness(
        in_order(tool_call_reply("add", a=1, b=2)), max_assistant_turns=2, reward=lambda o, row: 0.25
    )
    [trajectory] = harness.run_virtual(never_ends)
    assert trajectory.output.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert trajectory.output.failure is None
    assert trajectory.reward == 0.25
    assert trajectory.output.num_assistant_turns == 2
    assert [i.kind for i in trajectory.output.incidents] == [IncidentKind.FAILED_REQUEST]


def test_the_length_limit_cuts_the_completion_and_refuses_the_next_request() -> None:
    seen: list[Any] = []

    async def program(create: Any) -> None:
        reply = await create(model=MODEL, messages=user("?"))
        seen.append(reply.choices[0].finish_reason)
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model=MODEL, messages=[*user("?"), reply.choices[0].message, *user("more")])
        seen.append(caught.value.code)

    [trajectory] = ProgramHarness(
        in_order(text_reply("one two three four five six")), response_length=5
    ).run_virtual(program)
    assert seen == ["length", "context_length_exceeded"]
    assert trajectory.output.stop_reason is StopReason.RESPONSE_LENGTH
    assert len(trajectory.output.response_ids) == 5


def test_a_prompt_that_is_too_long_is_refused_and_recorded() -> None:
    async def program(create: Any) -> None:
        await create(model=MODEL, messages=user("?" * 99))

    [trajectory] = ProgramHarness(in_order(text_reply("x")), prompt_length=20).run_virtual(program)
    assert trajectory.output.stop_reason is StopReason.PROMPT_LENGTH
    assert trajectory.output.failure is None


def test_the_deadline_cancels_program_and_completion_and_keeps_the_tokens() -> None:
    slow = text_reply("one two three four five six seven", latency_s=20)
    harness = ProgramHarness(in_order(tool_call_reply("add", a=1, b=2), slow), deadline_s=10)
    [trajectory] = harness.run_virtual(never_ends)
    assert trajectory.output.stop_reason is StopReason.DEADLINE
    assert origins(trajectory.output) == ["prompt", "model", "tool", "model"]
    assert 0 < len(trajectory.output.segments[-1]) < len(slow.token_ids)


def test_a_program_that_raises_fails_alone_with_its_traceback_and_its_tokens() -> None:
    async def broken(create: Any) -> None:
        await create(model=MODEL, messages=user("?"))
        raise KeyError("nowhere")

    async def sound(create: Any) -> dict[str, Any]:
        await create(model=MODEL, messages=user("?"))
        return {"reward": 1, "steps": 3}

    failed, good = ProgramHarness(in_order(text_reply("x"))).run_virtual(broken, sound)
    assert failed.output.stop_reason is StopReason.FAILED
    assert "KeyError: 'nowhere'" in failed.output.failure.error
    assert "in broken" in failed.output.failure.traceback
    assert origins(failed.output) == ["prompt", "model"]
    assert (good.reward, good.output.extra_fields) == (1.0, {"steps": 3})


def test_a_program_that_sends_no_request_fails_with_the_reason() -> None:
    async def idle(row: Any) -> float:
        return 1.0

    [trajectory] = ProgramHarness(in_order(text_reply("x"))).run_virtual(idle)
    assert "make it use the base URL" in trajectory.output.failure.error


def test_a_return_value_that_is_not_a_reward_is_a_failure() -> None:
    async def odd(create: Any) -> str:
        await create(model=MODEL, messages=user("?"))
        return "good"

    [trajectory] = ProgramHarness(in_order(text_reply("x"))).run_virtual(odd)
    assert "the program returned 'good' (str)" in trajectory.output.failure.error


async def test_a_cancelled_trajectory_keeps_all_its_conversations() -> None:
    harness = ProgramHarness(in_order(text_reply("a"), text_reply("one two three four five", latency_s=100)))

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
        kept.append(asyncio.ensure_future(create(model=MODEL, messages=user("?"))))
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
    harness = ProgramHarness([server])

    async def program(create: Any) -> None:
        asyncio.get_running_loop().call_later(5, server.die)
        await create(model=MODEL, messages=user("?"))

    [trajectory] = await harness.worker.run([job(program)])
    assert trajectory.output.stop_reason is StopReason.FAILED
    assert "InternalServerError" in trajectory.output.failure.error
    assert "the engine was killed" in trajectory.output.failure.error


def test_the_number_of_conversations_is_limited() -> None:
    async def program(create: Any) -> None:
        for number in range(100):
            await create(model=MODEL, messages=user(str(number)))

    trajectories = ProgramHarness(in_order(text_reply("x"))).run_virtual(program)
    assert len(trajectories) == 64
    [incident] = trajectories[0].output.incidents
    assert "max_branches" in incident.detail
    assert all(t.output.failure is None for t in trajectories)


def test_a_stream_equals_the_whole_completion() -> None:
    async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        client = client_of(base_url, api_key, http_client)
        whole = await client.chat.completions.create(model=MODEL, messages=user("a"), tools=[ADD])
        async with client.chat.completions.stream(
            model=MODEL, messages=user("b"), tools=[ADD], stream_options={"include_usage": True}
        ) as stream:
            streamed = await stream.get_final_completion()
        one, two = whole.choices[0], streamed.choices[0]
        assert (one.message.content, one.finish_reason) == (two.message.content, two.finish_reason)
        assert [c.function.arguments for c in one.message.tool_calls] == [
            c.function.arguments for c in two.message.tool_calls
        ]
        assert streamed.usage == whole.usage
        answer = {"role": "tool", "tool_call_id": two.message.tool_calls[0].id, "content": "3"}
        await client.chat.completions.create(
            model=MODEL,
            messages=[*user("b"), two.message.model_dump(exclude_none=True), answer],
            tools=[ADD],
        )

    text = 'Let me add.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    harness = ProgramHarness(in_order(text_reply(text), text_reply(text), text_reply("Done.")))
    whole, streamed = harness.run_virtual(program)
    assert whole.output.response_ids.tolist() == encoded(text + "<|im_end|>")
    assert origins(streamed.output) == ["prompt", "model", "tool", "model"]
    assert streamed.output.segments[1].token_ids.tolist() == encoded(text + "<|im_end|>")
