"""Tests of the OpenAI Responses API: with the official client, and of the translation to chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from agent_loop.serve.responses_requests import (
    CallRecord,
    ResponsesRequest,
    TranslatedResponse,
    read_encrypted,
    translate_response,
    write_encrypted,
)
from agent_loop.servers.base import Ability
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.types import StopReason
from tests.harness import examples
from tests.helpers import call_text, encoded, roles, text_reply, user
from tests.serve.harness import ADD as CHAT_ADD
from tests.serve.harness import MODEL, ProgramHarness, in_order, origins, run_one

ADD = {"type": "function", **CHAT_ADD["function"], "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change a file.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SPAWN = {"type": "function", "name": "spawn", "description": "Start one.", "parameters": {"type": "object"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Tools for agents.", "tools": [SPAWN]}
THOUGHT = "<think>\nHm.\n</think>\n\n"


def output_of(call: Any, output: Any = "3", *, kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": call.call_id, "output": output}


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


# -- the client --------------------------------------------------------------------------------------------------------


def test_a_conversation_with_parallel_tools_is_one_trajectory() -> None:
    async def program(respond: Any) -> None:
        asked: dict[str, Any] = {"model": MODEL, "instructions": "Be brief.", "tools": [ADD]}
        first = await respond(input=user("1 + 2?"), **asked)
        assert first.status == "completed"
        assert kinds(first) == ["reasoning", "message", "function_call", "function_call"]
        reasoning, message, one, two = first.output
        assert (reasoning.content[0].text, message.content[0].text) == ("Hm.", "Now:")
        assert (one.name, one.arguments, two.arguments) == ("add", '{"a": 1}', '{"a": 2}')
        results = [output_of(one), output_of(two, [{"type": "input_text", "text": "4"}])]
        second = await respond(input=[*user("1 + 2?"), *first.output, *results], **asked)
        assert second.output_text == "Done."
        assert second.usage.output_tokens == len(encoded("Done.<|im_end|>"))

    both = f"{THOUGHT}Now:{call_text('add', a=1)}\n{call_text('add', a=2)}"
    output = run_one(program, both, "Done.")
    assert origins(output) == ["prompt", "model", "tool", "model"]
    assert roles(output.messages) == ["system", "user", "assistant", "tool", "tool", "assistant"]


@pytest.mark.parametrize("summary", [None, "auto"])
def test_streamed_events_are_the_response(summary: str | None) -> None:
    async def program(client: Any) -> None:
        asked: dict[str, Any] = {
            "model": MODEL,
            "tools": [ADD, PATCH],
            "input": "?",
            "reasoning": {"summary": summary},
            "include": ["reasoning.encrypted_content"],
        }
        whole = await client.responses.create(**asked)
        raw = [event async for event in await client.responses.create(**asked, stream=True)]
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        assert [event.sequence_number for event in raw] == list(range(len(raw)))
        assert [event.type for event in raw][:2] == ["response.created", "response.in_progress"]
        assert [event.type for event in events] == [event.type for event in raw]
        assert without_ids(streamed) == without_ids(whole) == without_ids(raw[-1].response)
        assert streamed.usage == whole.usage
        for event in raw:
            TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
        prefix = "reasoning_summary_text" if summary else "reasoning_text"
        for kind, text in (("output_text", "Now:"), (prefix, "Hm.")):
            deltas = [event.delta for event in raw if event.type == f"response.{kind}.delta"]
            assert "".join(deltas) == text
        [patch] = [event for event in raw if event.type == "response.custom_tool_call_input.done"]
        [call] = [event for event in raw if event.type == "response.function_call_arguments.done"]
        assert (patch.input, call.arguments) == ("*** a", '{"a": 1}')
        assert len({item.id for item in raw[-1].response.output}) == 4

    text = f"{THOUGHT}Now:{call_text('add', a=1)}{call_text('apply_patch', input='*** a')}"
    trajectories = ProgramHarness(in_order(text)).run_virtual(program)
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
        first = await respond(input="?", **asked)
        patch, spawn, other = first.output
        assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", '*** a\n"b"')
        assert (spawn.type, spawn.name, spawn.namespace) == ("function_call", "spawn", "agents")
        assert other.input == '{"patch": "*** a"}'  # other arguments than a text
        results = [output_of(call, kind=f"{call.type}_output") for call in first.output]
        assert (await respond(input=[*user("?"), *first.output, *results], **asked)).output_text == "Done."

    calls = [call_text("apply_patch", input='*** a\n"b"'), call_text("agents__spawn")]
    output = run_one(program, "".join([*calls, call_text("apply_patch", patch="*** a")]), "Done.")
    assert origins(output) == ["prompt", "model", "tool", "model"]
    assert output.messages[0]["role"] == "user"  # the tools are in the prompt, not in a message


def test_parse_with_a_text_format_returns_a_model() -> None:
    class Sum(BaseModel):
        value: int

    async def program(client: Any) -> None:
        first = await client.responses.parse(model=MODEL, input="1 + 2?", text_format=Sum)
        assert first.output_parsed == Sum(value=3)
        items = [*user("1 + 2?"), *first.output, *user("more")]
        async with client.responses.stream(model=MODEL, input=items, text_format=Sum) as stream:
            assert (await stream.get_final_response()).output_parsed == Sum(value=4)

    script = in_order('{"value": 3}', '{"value": 4}')
    server = ScriptedServer(script, streams=True, more_abilities=[Ability.JSON_SCHEMA])
    [trajectory] = ProgramHarness([server]).run_virtual(program)
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
    async def program(respond: Any) -> None:
        asked = {"model": MODEL, "input": "?", "max_output_tokens": 3}
        cut = await respond(**asked)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [item.status for item in cut.output] == ["incomplete"]
        *_, last = [event async for event in await respond(**asked, stream=True)]
        assert (last.type, last.response.output_text) == ("response.incomplete", cut.output_text)

    ProgramHarness(in_order("one two three four")).run_virtual(program)


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

    ProgramHarness(in_order("Hello there.")).run_virtual(program)


BROKEN_CALL = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{"}
FILE = {"type": "input_file", "file_id": "f"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"truncation": "auto"}, "truncation"),
    ({"extra_body": {"seeds": 1}}, "seeds"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"input": [{"type": "computer_call", "call_id": "x"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "input[0].colour"),
    ({"input": [BROKEN_CALL]}, "input[0].arguments"),
    ({"input": [{"role": "user", "content": [FILE]}]}, "input[0].content[0]"),
    ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input[0].id"),
    ({"tools": [ADD, ADD]}, "tools"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format"),
    ({"text": {"form": {}}}, "text.form"),
    ({"tool_choice": {"type": "web_search"}, "tools": [ADD]}, "tool_choice"),
    ({"background": True}, "background"),
    ({"input": []}, "input"),
]


def test_errors_reach_the_client_by_name() -> None:
    async def program(respond: Any) -> None:
        for fields, param in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                await respond(**{"model": MODEL, "input": "?", **fields})
            assert caught.value.param == param
        await respond(model=MODEL, input="?")

    run_one(program, "x")


def test_a_stream_that_fails_ends_with_a_failed_response() -> None:
    async def program(respond: Any) -> None:
        events = [event async for event in await respond(model=MODEL, input="?", stream=True)]
        assert (events[-1].type, events[-1].response.error.code) == ("response.failed", "deadline")
        assert events[-1].sequence_number == len(events) - 1

    output = run_one(program, text_reply("one two three", latency_s=9), generate_timeout_s=5)
    assert output.stop_reason is StopReason.DEADLINE


def test_a_hosted_tool_that_is_a_wish_is_dropped_and_named() -> None:
    async def program(respond: Any) -> None:
        tools: list[Any] = [ADD, {"type": "web_search", "external_web_access": True}]
        asked: dict[str, Any] = {"model": MODEL, "tools": tools, "text": {"verbosity": "low"}}
        first = await respond(input="?", truncation="auto", **asked)
        await respond(input=[*user("?"), *first.output, *user("more")], **asked)

    output = run_one(program, "x", "y", loop={"accept_as_wish": ["tools.web_search", "truncation"]})
    assert origins(output) == ["prompt", "model", "interaction", "model"]
    dropped = {incident.detail.split(" ")[0] for incident in output.incidents}
    assert dropped == {"truncation", "tools.web_search", "verbosity"}


def test_tools_in_the_input_are_declared_with_the_others_and_stay_declared() -> None:
    async def program(respond: Any) -> None:
        functions = {"type": "namespace", "name": "functions", "description": "", "tools": [PATCH]}
        more = {"type": "additional_tools", "role": "developer", "tools": [functions]}
        asked: dict[str, Any] = {"model": MODEL, "tools": [ADD]}
        [call] = (await respond(input=[more, *user("?")], **asked)).output
        assert (call.type, call.namespace, call.input) == ("custom_tool_call", "functions", "*** a")
        result = output_of(call, kind="custom_tool_call_output")
        await respond(input=[more, *user("?"), call, result], **asked)

    output = run_one(program, call_text("functions__apply_patch", input="*** a"), "Done.")
    assert origins(output) == ["prompt", "model", "tool", "model"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_forced_custom_tool_and_single_calls_are_honoured(is_streamed: bool) -> None:
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

    opened = '<tool_call>\n{"name": "apply_patch", "arguments":'
    forced = call_text("apply_patch", input="*** a").removeprefix(opened)
    output = run_one(program, forced, call_text("add", a=1))
    assert origins(output) == ["prompt", "prefix", "model", "tool", "model"]
    assert output.incidents == ()


# -- items of any equivalent shape -------------------------------------------------------------------------------------

TOOLS = [ADD, PATCH, AGENTS]


@dataclass(frozen=True)
class Turn:
    """Turn of the model."""

    thought: str
    text: str
    calls: tuple[str, ...]

    @property
    def completion(self) -> str:
        thought = f"<think>\n{self.thought}\n</think>\n\n" if self.thought else ""
        return "".join([thought, self.text, *self.calls])


@dataclass(frozen=True)
class Shape:
    """How a client sends a turn and the results of its calls."""

    has_reasoning: bool
    has_ids: bool
    has_status: bool
    is_easy: bool
    has_results_after_each_call: bool
    has_listed_results: bool
    is_streamed: bool

    def items(self, output: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
        """Return the items of a turn, with the results of its calls or a new message."""
        kept = [self.item(i) for i in output if self.keeps(i)]
        results = [self.result(item) for item in output if "call_id" in item]
        if self.has_results_after_each_call:
            calls = [item for item in kept if "call_id" in item]
            kept = [item for item in kept if "call_id" not in item]
            results = [each for pair in zip(calls, results, strict=True) for each in pair]
        more = [] if results else [{"role": "user", "content": f"more {number}"}]
        return [*kept, *results, *more]

    def keeps(self, item: dict[str, Any]) -> bool:
        return self.has_reasoning or item["type"] != "reasoning"

    def item(self, item: dict[str, Any]) -> dict[str, Any]:
        if item["type"] == "message" and self.is_easy:
            return {"role": "assistant", "content": item["content"][0]["text"]}
        kept = {"id": self.has_ids, "status": self.has_status}
        return {key: value for key, value in item.items() if kept.get(key, True)}

    def result(self, call: dict[str, Any]) -> dict[str, Any]:
        kind = "custom_tool_call_output" if call["type"] == "custom_tool_call" else "function_call_output"
        text: Any = [{"type": "input_text", "text": "3"}] if self.has_listed_results else "3"
        return {"type": kind, "call_id": call["call_id"], "output": text}


CALLS = st.sampled_from(
    [
        call_text("add", a=1, b=2),
        call_text("add"),
        call_text("apply_patch", input="*** a"),
        call_text("apply_patch", other=[1, 2.0]),
        call_text("agents__spawn"),
    ]
)
TURNS = st.builds(
    Turn,
    thought=st.sampled_from(["", "Hm.", "First this.\nThen that."]),
    text=st.sampled_from(["", "Now:", "One line.\n\n  Another."]),
    calls=st.lists(CALLS, max_size=3).map(tuple),
)
SHAPES = st.builds(Shape, *[st.booleans()] * 7)


@examples(40, derandomize=True, database=None)
@given(st.lists(st.tuples(TURNS, SHAPES), min_size=1, max_size=4))
def test_a_turn_in_any_equivalent_shape_is_the_same_turn(script: list[tuple[Turn, Shape]]) -> None:
    async def program(respond: Any) -> None:
        history: list[Any] = [{"role": "user", "content": "Begin."}]
        for number, (_, shape) in enumerate(script):
            response = await respond(
                model=MODEL, tools=TOOLS, instructions="Help.", stream=shape.is_streamed, input=history
            )
            if shape.is_streamed:
                response = [event async for event in response][-1].response
            output = [item.to_dict() for item in response.output]
            history = [*history, *shape.items(output, number)]
        await respond(model=MODEL, tools=TOOLS, instructions="Help.", input=history)

    texts = [*(turn.completion for turn, _ in script), "End."]
    output = run_one(program, *texts, prompt_length=9999, response_length=9999)
    sampled = [segment.token_ids.tolist() for segment in output.segments if segment.origin == "model"]
    assert sampled == [encoded(f"{text}<|im_end|>") for text in texts]


# -- the translation ---------------------------------------------------------------------------------------------------

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}


def prepared(**fields: Any) -> TranslatedResponse:
    request = ResponsesRequest.read({"model": "m", **fields})
    return translate_response(request, calls=CallRecord())


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    chat = prepared(input=list(items), **fields).chat
    return [message.model_dump(exclude_none=True) for message in chat.messages]


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([said("a"), said("b")], [("a", ""), ("b", "")]),
        ([thought("x"), said("a"), thought("y"), said("b")], [("a", "x"), ("b", "y")]),
        ([said("a"), thought("y")], [("a", "y")]),
        ([thought("x"), said("a"), thought("y"), CALL], [("a", "xy")]),
        ([CALL, said("a")], [("a", "")]),
        ([thought("x")], [("", "x")]),
    ],
)
def test_a_second_message_begins_another_turn(items: list[Any], turns: list[tuple[str, str]]) -> None:
    read = [(message["content"], message.get("reasoning_content", "")) for message in messages(*items)]
    assert read == turns


@pytest.mark.parametrize(
    ("recorded", "sent", "expected"),
    [
        ([("c1", "r"), ("c2", "r")], ["c1", "c2", "c3"], ["assistant", "tool", "tool", "assistant", "tool"]),
        ([("c1", "r0"), ("c1", "r1")], ["c1", "c1"], ["assistant", "tool"] * 2),
    ],
    ids=["calls of one response", "repeated ids"],
)
def test_calls_that_follow_results_of_their_own_turn_belong_to_it(
    recorded: list[tuple[str, str]], sent: list[str], expected: list[str]
) -> None:
    calls = CallRecord()
    for call_id, response_id in recorded:
        calls.add(call_id, response_id=response_id)
    items = [{**item, "call_id": call_id} for call_id in sent for item in (CALL, OUTPUT)]
    chat = translate_response(ResponsesRequest.read({"model": "m", "input": items}), calls=calls).chat
    assert [message.role for message in chat.messages] == expected


def test_only_the_latest_calls_are_kept() -> None:
    calls = CallRecord(max_calls=2)
    for call_id in ("c1", "c2", "c3"):
        calls.add(call_id, response_id="r", text="{}", arguments={})
    assert calls.custom_arguments("c1", "{}") is None
    assert calls.custom_arguments("c3", "{}") == {}
    assert calls.custom_arguments("c3", "other") is None
    assert not calls.are_of_one_turn(["c1", "c2"])


def test_parameters_have_the_names_of_chat_requests() -> None:
    schema = {"type": "object", "properties": {}}
    chat = prepared(
        input="?",
        instructions="Be brief.",
        tools=[{"type": "custom", "name": "patch"}],
        tool_choice={"type": "custom", "name": "patch"},
        parallel_tool_calls=False,
        max_output_tokens=5,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        top_logprobs=2,
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        user="u",
        stream=True,
    ).chat
    assert [message.role for message in chat.messages] == ["system", "user"]
    assert chat.forced_tool == "patch"
    assert (chat.parallel_tool_calls, chat.max_new_tokens, chat.reasoning_effort) == (False, 5, "low")
    assert (chat.logprobs, chat.top_logprobs, chat.temperature, chat.top_p) == (True, 2, 0.5, 0.9)
    assert '"properties"' in chat.json_schema
    assert chat.stream


def test_a_grammar_is_shown_to_the_model() -> None:
    text_format = {"type": "grammar", "syntax": "lark", "definition": "start: X"}
    [tool] = (
        prepared(input="?", tools=[{"type": "custom", "name": "p", "format": text_format}]).chat.tools or []
    )
    described = tool["function"]["parameters"]["properties"]["input"]["description"]
    assert described.endswith("that matches this lark grammar:\nstart: X")


def test_reasoning_tokens_are_read_back_and_foreign_ones_are_not() -> None:
    assert read_encrypted(write_encrypted("Hm. \N{SNOWMAN}\n")) == "Hm. \N{SNOWMAN}\n"
    assert read_encrypted("gAAAA") is None
    assert read_encrypted(write_encrypted("x") + "!") is None
