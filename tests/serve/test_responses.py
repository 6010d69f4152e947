"""Tests of the OpenAI Responses API with the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from agent_loop.servers.base import Ability
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.trajectory import IncidentKind
from agent_loop.types import StopReason
from tests.helpers import call_text, encoded, text_reply, user
from tests.serve.harness import MODEL, ProgramHarness, client_of, in_order, origins

ADD = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change a file.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Tools for agents.",
    "tools": [
        {"type": "function", "name": "spawn", "description": "Start one.", "parameters": {"type": "object"}}
    ],
}
THOUGHT = "<think>\nHm.\n</think>\n\n"


def output_of(call: Any, output: Any = "3", *, kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": call.call_id, "output": output}


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


def run_one(program: Any, *texts: str, **limits: Any) -> Any:
    """Run a program against these completions, and return its only output."""
    [trajectory] = ProgramHarness(in_order(*map(text_reply, texts)), **limits).run_virtual(program)
    assert trajectory.output.failure is None, trajectory.output.failure.traceback
    return trajectory.output


def test_a_conversation_with_parallel_tools_is_one_trajectory() -> None:
    async def program(respond: Any) -> float:
        asked: dict[str, Any] = {"model": MODEL, "instructions": "Be brief.", "tools": [ADD]}
        items: list[Any] = [{"role": "user", "content": "1 + 2?"}]
        first = await respond(input=items, **asked)
        assert (first.status, kinds(first)) == (
            "completed",
            ["reasoning", "message", "function_call", "function_call"],
        )
        reasoning, message, one, two = first.output
        assert (reasoning.content[0].text, message.content[0].text) == ("Hm.", "Now:")
        assert (one.name, one.arguments, two.arguments) == ("add", '{"a": 1}', '{"a": 2}')
        listed = [{"type": "input_text", "text": "4"}]
        items += [*first.output, output_of(one), output_of(two, listed)]
        second = await respond(input=items, **asked)
        assert second.output_text == "Done."
        assert second.usage.output_tokens == len(encoded("Done.<|im_end|>"))
        return 1.0

    both = f"{THOUGHT}Now:{call_text('add', a=1)}\n{call_text('add', a=2)}"
    output = run_one(program, both, "Done.")
    assert origins(output) == ["prompt", "model", "tool", "model"]
    roles = [message["role"] for message in output.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]


@pytest.mark.parametrize("summary", [None, "auto"])
def test_streamed_events_are_the_response(summary: str | None) -> None:
    async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        responses = client_of(base_url, api_key, http_client).responses
        asked: dict[str, Any] = {
            "model": MODEL,
            "tools": [ADD, PATCH],
            "input": "?",
            "reasoning": {"summary": summary},
            "include": ["reasoning.encrypted_content"],
        }
        whole = await responses.create(**asked)
        raw = [event async for event in await responses.create(**asked, stream=True)]
        async with responses.stream(**asked) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        assert [event.sequence_number for event in raw] == list(range(len(raw)))
        assert [event.type for event in raw][:2] == ["response.created", "response.in_progress"]
        assert [event.type for event in events] == [event.type for event in raw]
        assert without_ids(streamed) == without_ids(whole) == without_ids(raw[-1].response)
        assert streamed.usage == whole.usage
        for event in raw:
            TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
        deltas = [event for event in raw if event.type == "response.output_text.delta"]
        assert "".join(event.delta for event in deltas) == "Now:"
        prefix = "reasoning_summary_text" if summary else "reasoning_text"
        thoughts = [event for event in raw if event.type == f"response.{prefix}.delta"]
        assert "".join(event.delta for event in thoughts) == "Hm."
        [patch] = [event for event in raw if event.type == "response.custom_tool_call_input.done"]
        assert patch.input == "*** a"
        [call] = [event for event in raw if event.type == "response.function_call_arguments.done"]
        assert call.arguments == '{"a": 1}'
        assert len({item.id for item in raw[-1].response.output}) == 4

    text = f"{THOUGHT}Now:{call_text('add', a=1)}{call_text('apply_patch', input='*** a')}"
    trajectories = ProgramHarness(in_order(text_reply(text))).run_virtual(program)
    assert [trajectory.output.failure for trajectory in trajectories] == [None] * 3


def without_ids(response: Any) -> Any:
    items = [item.to_dict() for item in response.output]
    for item in items:
        del item["id"]
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return items


def test_custom_and_grouped_tools_come_back_as_the_client_declared_them() -> None:
    async def program(respond: Any) -> None:
        asked: dict[str, Any] = {"model": MODEL, "tools": [PATCH, AGENTS]}
        items: list[Any] = [{"role": "user", "content": "?"}]
        first = await respond(input=items, **asked)
        patch, spawn = first.output
        assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", '*** a\n"b"')
        assert (spawn.type, spawn.name, spawn.namespace) == ("function_call", "spawn", "agents")
        items += [patch, spawn, output_of(patch, kind="custom_tool_call_output"), output_of(spawn)]
        assert (await respond(input=items, **asked)).output_text == "Done."

    calls = call_text("apply_patch", input='*** a\n"b"') + call_text("agents__spawn")
    output = run_one(program, calls, "Done.")
    assert origins(output) == ["prompt", "model", "tool", "model"]
    prompt = output.messages[0]["content"] if output.messages[0]["role"] == "system" else ""
    assert prompt == ""  # the tools are in the prompt, not in a message


def test_a_custom_call_with_other_arguments_than_a_text_is_still_the_same_turn() -> None:
    async def program(respond: Any) -> None:
        items: list[Any] = [{"role": "user", "content": "?"}]
        first = await respond(model=MODEL, input=items, tools=[PATCH])
        [call] = first.output
        assert call.input == '{"patch": "*** a"}'
        items += [call, output_of(call, "no input", kind="custom_tool_call_output")]
        await respond(model=MODEL, input=items, tools=[PATCH])

    output = run_one(program, call_text("apply_patch", patch="*** a"), "Done.")
    assert origins(output) == ["prompt", "model", "tool", "model"]


def test_parse_with_a_text_format_returns_a_model() -> None:
    class Sum(BaseModel):
        value: int

    async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        responses = client_of(base_url, api_key, http_client).responses
        first = await responses.parse(model=MODEL, input="1 + 2?", text_format=Sum)
        assert first.output_parsed == Sum(value=3)
        items = [*user("1 + 2?"), *first.output, *user("more")]
        async with responses.stream(model=MODEL, input=items, text_format=Sum) as stream:
            assert (await stream.get_final_response()).output_parsed == Sum(value=4)

    script = in_order(text_reply('{"value": 3}'), text_reply('{"value": 4}'))
    server = ScriptedServer(script, streams=True, more_abilities=[Ability.JSON_SCHEMA])
    [trajectory] = ProgramHarness([server]).run_virtual(program)
    assert trajectory.output.failure is None
    assert origins(trajectory.output) == ["prompt", "model", "interaction", "model"]
    assert all('"value"' in request.sampling_params.json_schema for request in server.requests)


def test_encrypted_reasoning_comes_back_without_a_store() -> None:
    async def program(respond: Any) -> None:
        asked: dict[str, Any] = {"model": MODEL, "store": False, "include": ["reasoning.encrypted_content"]}
        first = await respond(input="?", **asked)
        reasoning, message = first.output
        hidden = {"type": "reasoning", "summary": [], "encrypted_content": reasoning.encrypted_content}
        await respond(input=[*user("?"), hidden, message, *user("more")], **asked)

    output = run_one(program, f"{THOUGHT}First.", "Second.")
    assert origins(output) == ["prompt", "model", "interaction", "model"]


def test_a_completion_that_is_cut_is_incomplete() -> None:
    async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        responses = client_of(base_url, api_key, http_client).responses
        cut = await responses.create(model=MODEL, input="?", max_output_tokens=3)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [item.status for item in cut.output] == ["incomplete"]
        events = [
            e async for e in await responses.create(model=MODEL, input="?", max_output_tokens=3, stream=True)
        ]
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output_text == cut.output_text

    ProgramHarness(in_order(text_reply("one two three four"))).run_virtual(program)


def test_log_probs_are_returned_with_the_text() -> None:
    async def program(respond: Any) -> None:
        asked: dict[str, Any] = {"model": MODEL, "input": "?", "include": ["message.output_text.logprobs"]}
        whole = await respond(**asked)
        events = [event async for event in await respond(**asked, stream=True)]
        listed = whole.output[0].content[0].logprobs
        assert len(listed) == len(encoded("Hello there.<|im_end|>"))
        assert "".join(each.token for each in listed).startswith("Hello there.")
        [done] = [event for event in events if event.type == "response.output_text.done"]
        assert [each.token for each in done.logprobs] == [each.token for each in listed]

    ProgramHarness(in_order(text_reply("Hello there."))).run_virtual(program)


def test_limits_and_errors_reach_the_client_by_name() -> None:
    async def program(respond: Any) -> None:
        refused: list[tuple[dict[str, Any], str]] = [
            ({"tools": [{"type": "web_search"}]}, "tools[0]"),
            ({"truncation": "auto"}, "truncation"),
            ({"extra_body": {"seeds": 1}}, "seeds"),
            ({"prompt": {"id": "x"}}, "prompt"),
            ({"input": [{"type": "computer_call", "call_id": "x"}]}, "input[0]"),
            ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "input[0].colour"),
            (
                {"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{"}]},
                "input[0].arguments",
            ),
            (
                {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
                "input[0].content[0]",
            ),
            ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input[0].id"),
            ({"tools": [ADD, ADD]}, "tools"),
            ({"text": {"format": {"type": "yaml"}}}, "text.format"),
            ({"text": {"form": {}}}, "text.form"),
            ({"tool_choice": {"type": "web_search"}, "tools": [ADD]}, "tool_choice"),
            ({"background": True}, "background"),
            ({"input": []}, "input"),
        ]
        for fields, param in refused:
            with pytest.raises(openai.BadRequestError) as caught:
                await respond(**{"model": MODEL, "input": "?", **fields})
            assert caught.value.param == param
        items: list[Any] = user("?")
        while True:
            reply = await respond(model=MODEL, input=items)
            items = [*items, *reply.output, *user("more")]

    [trajectory] = ProgramHarness(in_order(text_reply("x")), max_assistant_turns=3).run_virtual(program)
    assert trajectory.output.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert trajectory.output.failure is None
    assert [i.kind for i in trajectory.output.incidents] == [IncidentKind.FAILED_REQUEST]


def test_a_stream_that_fails_ends_with_a_failed_response() -> None:
    async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        responses = client_of(base_url, api_key, http_client).responses
        events = [event async for event in await responses.create(model=MODEL, input="?", stream=True)]
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.code == "deadline"
        assert events[-1].sequence_number == len(events) - 1

    harness = ProgramHarness(in_order(text_reply("one two three", latency_s=9)), generate_timeout_s=5)
    [trajectory] = harness.run_virtual(program)
    assert trajectory.output.stop_reason is StopReason.DEADLINE


def test_a_hosted_tool_that_is_a_wish_is_dropped_and_named() -> None:
    async def program(respond: Any) -> None:
        tools: list[Any] = [ADD, {"type": "web_search", "external_web_access": True}]
        asked: dict[str, Any] = {"model": MODEL, "tools": tools, "text": {"verbosity": "low"}}
        first = await respond(input="?", truncation="auto", **asked)
        await respond(input=[*user("?"), *first.output, *user("more")], **asked)

    harness = ProgramHarness(
        in_order(text_reply("x"), text_reply("y")),
        loop={"accept_as_wish": ["tools.web_search", "truncation"]},
    )
    [trajectory] = harness.run_virtual(program)
    assert trajectory.output.failure is None
    assert origins(trajectory.output) == ["prompt", "model", "interaction", "model"]
    dropped = [incident.detail for incident in trajectory.output.incidents]
    assert {detail.split(" ")[0] for detail in dropped} == {"truncation", "tools.web_search", "verbosity"}


def test_tools_in_the_input_are_declared_with_the_others_and_stay_declared() -> None:
    async def program(respond: Any) -> None:
        functions = {"type": "namespace", "name": "functions", "description": "", "tools": [PATCH]}
        more = {"type": "additional_tools", "role": "developer", "tools": [functions]}
        asked: dict[str, Any] = {"model": MODEL, "tools": [ADD]}
        first = await respond(input=[more, *user("?")], **asked)
        [call] = first.output
        assert (call.type, call.namespace, call.input) == ("custom_tool_call", "functions", "*** a")
        result = output_of(call, kind="custom_tool_call_output")
        await respond(input=[more, *user("?"), call, result], **asked)

    output = run_one(program, call_text("functions__apply_patch", input="*** a"), "Done.")
    assert origins(output) == ["prompt", "model", "tool", "model"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_forced_custom_tool_and_single_calls_are_honoured(is_streamed: bool) -> None:
    opened = '<tool_call>\n{"name": "apply_patch", "arguments":'

    async def program(respond: Any) -> None:
        asked: dict[str, Any] = {"model": MODEL, "tools": [ADD, PATCH]}
        choice: Any = {"type": "custom", "name": "apply_patch"}
        first = await respond(input="?", tool_choice=choice, stream=is_streamed, **asked)
        if is_streamed:
            first = [event async for event in first][-1].response
        [call] = first.output
        assert (call.type, call.input) == ("custom_tool_call", "*** a")
        items = [*user("?"), call, output_of(call, kind="custom_tool_call_output")]
        second = await respond(input=items, parallel_tool_calls=False, **asked)
        assert kinds(second) == ["function_call"]

    forced = call_text("apply_patch", input="*** a").removeprefix(opened)
    output = run_one(program, forced, call_text("add", a=1))
    assert origins(output) == ["prompt", "prefix", "model", "tool", "model"]
    assert output.incidents == ()
