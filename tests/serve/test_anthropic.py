"""Tests of the Anthropic Messages API with the official client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from agent_loop.trajectory import IncidentKind
from agent_loop.types import StopReason
from tests.helpers import call_text, encoded, text_reply, tool_call_reply, user
from tests.serve.harness import MODEL, ProgramHarness, in_order, origins, prompts

ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


def client_of(anthropic_base_url: str, api_key: str, http_client: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=anthropic_base_url, api_key=api_key, http_client=http_client, max_retries=0
    )


def result_of(block: Any, content: Any = "3") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": block.id, "content": content}


def test_a_conversation_with_parallel_tools_is_one_trajectory() -> None:
    async def program(row: Any, *, anthropic_base_url: str, api_key: str, http_client: Any) -> float:
        create = client_of(anthropic_base_url, api_key, http_client).messages.create
        asked: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 64,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "tools": [ADD],
        }
        messages: list[Any] = user("1 + 2?")
        first = await create(messages=messages, **asked)
        assert first.stop_reason == "tool_use"
        text, one, two = first.content
        assert (text.text, one.input, two.input) == ("Now:", {"a": 1}, {"a": 2})
        results = [result_of(one), result_of(two, [{"type": "text", "text": "4"}])]
        messages = [
            *messages,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [*results, {"type": "text", "text": "Quick."}]},
        ]
        second = await create(messages=messages, **asked)
        assert (second.content[0].text, second.stop_reason) == ("Done.", "end_turn")
        assert second.usage.output_tokens == len(encoded("Done.<|im_end|>"))
        return 1.0

    both = f"Now:{call_text('add', a=1)}\n{call_text('add', a=2)}"
    [trajectory] = ProgramHarness(in_order(text_reply(both), text_reply("Done."))).run_virtual(program)
    assert trajectory.output.failure is None
    assert origins(trajectory.output) == ["prompt", "model", "tool", "model"]
    roles = [message["role"] for message in trajectory.output.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "user", "assistant"]


def test_streamed_events_are_the_message() -> None:
    text = f"<think>\nHm.\n</think>\n\nNow:{call_text('add', a=1)}"

    async def program(row: Any, *, anthropic_base_url: str, api_key: str, http_client: Any) -> None:
        messages = client_of(anthropic_base_url, api_key, http_client).messages
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "tools": [ADD], "messages": user("?")}
        thinks = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        whole = await messages.create(**asked, **thinks)
        async with messages.stream(**asked, **thinks) as stream:
            events = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        assert events[0] == "message_start"
        assert events[-1] == "message_stop"
        kinds = [block.type for block in streamed.content]
        assert kinds == ["thinking", "text", "tool_use"]
        assert [b.model_dump(exclude={"id"}) for b in streamed.content] == [
            b.model_dump(exclude={"id"}) for b in whole.content
        ]
        assert streamed.stop_reason == whole.stop_reason == "tool_use"
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        assert streamed.usage.input_tokens == whole.usage.input_tokens
        history = [*user("?"), {"role": "assistant", "content": streamed.content}]
        results = [{"role": "user", "content": [result_of(streamed.content[-1])]}]
        await messages.create(**{**asked, "messages": [*history, *results]})

    whole, streamed = ProgramHarness(
        in_order(text_reply(text), text_reply(text), text_reply("3"))
    ).run_virtual(program)
    assert origins(whole.output) == ["prompt", "model"]
    assert origins(streamed.output) == ["prompt", "model", "tool", "model"]


def test_errors_have_anthropics_format_and_limits_stop_the_program() -> None:
    async def program(row: Any, *, anthropic_base_url: str, api_key: str, http_client: Any) -> None:
        create = client_of(anthropic_base_url, api_key, http_client).messages.create
        with pytest.raises(anthropic.BadRequestError, match="web_search_20250305") as caught:
            await create(
                model=MODEL,
                max_tokens=9,
                messages=user("?"),
                tools=[ADD, {"type": "web_search_20250305", "name": "web_search"}],
            )
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        messages: list[Any] = user("?")
        while True:
            reply = await create(model=MODEL, max_tokens=9, messages=messages)
            messages = [*messages, {"role": "assistant", "content": reply.content}, *user("more")]

    [trajectory] = ProgramHarness(in_order(text_reply("x")), max_assistant_turns=3).run_virtual(program)
    assert trajectory.output.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert trajectory.output.failure is None


def test_a_conversation_may_use_both_apis() -> None:
    import openai

    async def program(
        row: Any, *, base_url: str, anthropic_base_url: str, api_key: str, http_client: Any
    ) -> None:
        create = client_of(anthropic_base_url, api_key, http_client).messages.create
        first = await create(model=MODEL, max_tokens=99, messages=user("?"))
        other = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        answer = {"role": "assistant", "content": first.content[0].text}
        await other.chat.completions.create(model=MODEL, messages=[*user("?"), answer, *user("more")])

    [trajectory] = ProgramHarness(in_order(text_reply("x"), text_reply("y"))).run_virtual(program)
    assert origins(trajectory.output) == ["prompt", "model", "interaction", "model"]


def test_counted_tokens_are_those_of_the_next_prompt_and_counting_leaves_no_trace() -> None:
    counts: list[int] = []

    async def program(row: Any, *, anthropic_base_url: str, api_key: str, http_client: Any) -> None:
        messages_api = client_of(anthropic_base_url, api_key, http_client).messages
        asked: dict[str, Any] = {"model": MODEL, "system": "Be brief.", "tools": [ADD]}
        messages: list[Any] = user("1 + 2?")
        for _ in range(3):
            counts.append((await messages_api.count_tokens(messages=messages, **asked)).input_tokens)
            reply = await messages_api.create(max_tokens=64, messages=messages, **asked)
            results = [result_of(block) for block in reply.content if block.type == "tool_use"]
            messages = [
                *messages,
                {"role": "assistant", "content": reply.content},
                {"role": "user", "content": results or "More."},
            ]
        messages[-1] = {"role": "assistant", "content": "It"}  # continues the text of another turn
        prefilled = [*messages[:-2], messages[-1]]
        counts.append((await messages_api.count_tokens(messages=prefilled, **asked)).input_tokens)
        await messages_api.create(max_tokens=64, messages=prefilled, **asked)

    harness = ProgramHarness(
        in_order(tool_call_reply("add", a=1), text_reply("3."), text_reply("Yes."), text_reply(" is."))
    )
    trajectories = harness.run_virtual(program)
    assert counts == [len(request.prompt_ids) for request in harness.server.requests]
    assert origins(trajectories[0].output) == ["prompt", "model", "tool", "model", "interaction", "model"]


async def search_and_add(row: Any, *, anthropic_base_url: str, api_key: str, http_client: Any) -> None:
    tools: list[Any] = [{"type": "web_search_20250305", "name": "web_search"}, ADD]
    create = client_of(anthropic_base_url, api_key, http_client).messages.create
    await create(model=MODEL, max_tokens=64, messages=user("?"), tools=tools)


def test_a_tool_of_anthropic_may_be_a_wish() -> None:
    harness = ProgramHarness(
        in_order(text_reply("x")), loop={"accept_as_wish": ["tools.web_search_20250305"]}
    )
    [trajectory] = harness.run_virtual(search_and_add)
    [prompt] = prompts(harness.server.requests)
    assert '"add"' in prompt
    assert "web_search" not in prompt
    [incident] = trajectory.output.incidents
    assert incident.kind is IncidentKind.DROPPED_PARAMETER
    assert "web_search_20250305" in incident.detail


def test_edits_of_the_context_are_not_applied_and_are_incidents() -> None:
    async def program(row: Any, *, anthropic_base_url: str, api_key: str, http_client: Any) -> None:
        messages = client_of(anthropic_base_url, api_key, http_client).beta.messages
        edits = [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]
        asked: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 64,
            "context_management": {"edits": edits},
            "betas": ["context-management-2025-06-27"],
        }
        whole = await messages.create(messages=user("?"), **asked)
        history = [*user("?"), {"role": "assistant", "content": whole.content}, *user("more")]
        async with messages.stream(messages=history, **asked) as stream:
            streamed = await stream.get_final_message()
        assert whole.context_management.applied_edits == streamed.context_management.applied_edits == []

    [trajectory] = ProgramHarness(in_order(text_reply("x"))).run_virtual(program)
    assert origins(trajectory.output) == ["prompt", "model", "interaction", "model"]
    [incident] = trajectory.output.incidents
    assert (incident.kind, incident.detail) == (
        IncidentKind.DROPPED_PARAMETER,
        "context_management: the edit 'clear_tool_uses_20250919' is not applied",
    )


def test_a_failed_call_is_told_to_the_model_and_recognised_when_it_comes_back() -> None:
    async def program(row: Any, *, anthropic_base_url: str, api_key: str, http_client: Any) -> None:
        create = client_of(anthropic_base_url, api_key, http_client).messages.create
        messages: list[Any] = user("1 + 2?")
        for content in ("no such file", [{"type": "text", "text": "no such file"}]):
            reply = await create(model=MODEL, max_tokens=64, messages=messages, tools=[ADD])
            failed = {**result_of(reply.content[-1], content), "is_error": True}
            messages = [
                *messages,
                {"role": "assistant", "content": reply.content},
                {"role": "user", "content": [failed]},
            ]
        await create(model=MODEL, max_tokens=64, messages=messages, tools=[ADD])

    calls = [text_reply(call_text("add", a=number)) for number in (1, 2)]
    harness = ProgramHarness(in_order(*calls, text_reply("Sorry.")))
    [trajectory] = harness.run_virtual(program)
    assert origins(trajectory.output) == ["prompt", "model", "tool", "model", "tool", "model"]
    assert prompts(harness.server.requests)[-1].count("Error: no such file") == 2


def test_thinking_that_is_left_out_is_still_the_models_turn() -> None:
    async def program(row: Any, *, anthropic_base_url: str, api_key: str, http_client: Any) -> None:
        messages = client_of(anthropic_base_url, api_key, http_client).messages
        asked: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 64,
            "thinking": {"type": "adaptive", "display": "omitted"},
        }
        async with messages.stream(messages=user("?"), **asked) as stream:
            streamed = await stream.get_final_message()
        assert [block.type for block in streamed.content] == ["thinking", "text"]
        assert streamed.content[0].thinking == ""
        history = [*user("?"), {"role": "assistant", "content": streamed.content}, *user("more")]
        await messages.create(messages=history, **asked)

    text = "<think>\nHm.\n</think>\n\nYes."
    [trajectory] = ProgramHarness(in_order(text_reply(text), text_reply("Done."))).run_virtual(program)
    assert origins(trajectory.output) == ["prompt", "model", "interaction", "model"]


def test_models_are_described_to_each_client_in_its_format() -> None:
    import openai

    async def program(
        row: Any, *, base_url: str, anthropic_base_url: str, api_key: str, http_client: Any
    ) -> None:
        client = client_of(anthropic_base_url, api_key, http_client)
        models = [model async for model in client.models.list()]
        assert [model.type for model in models] == ["model"]
        assert (await client.models.retrieve("claude-x")).id == "claude-x"
        other = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        assert [model.object async for model in other.models.list()] == ["model"]
        reply = await client.messages.create(model="claude-x", max_tokens=8, messages=user("?"))
        assert (reply.model, reply._request_id[:4]) == ("claude-x", "req_")

    [trajectory] = ProgramHarness(in_order(text_reply("x"))).run_virtual(program)
    assert trajectory.output.failure is None
