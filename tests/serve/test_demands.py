"""Tests of what requests demand of a completion: forced calls, one call, JSON, template variables, several choices, and
turns that begin with a text or continue a cut turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from agent_loop.chat.placeholder_tokenizer import placeholder_tokenizer
from agent_loop.chat.template import ChatTemplate
from agent_loop.servers.base import Ability
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.trajectory import IncidentKind
from tests.chat.test_hostile_text import OPENS_REASONING
from tests.helpers import HERMES_TEMPLATE, call_text, encoded, hermes_template, text_reply, user
from tests.serve.harness import (
    ADD,
    MODEL,
    ProgramHarness,
    calls_of,
    in_order,
    origins,
    prompts,
    run_one,
    tokens,
)

SUB = {"type": "function", "function": {"name": "sub"}}
NAMED = {"type": "function", "function": {"name": "add"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
REST = {"continue_final_message": True, "return_token_ids": True}


class Sum(BaseModel):
    total: int


def incidents(output: Any) -> list[IncidentKind]:
    return [incident.kind for incident in output.incidents]


def run(program: Any, *replies: Any, template: Any = None, abilities: Sequence[Ability] = ()) -> Any:
    server = ScriptedServer(in_order(*replies), streams=True, more_abilities=abilities)
    harness = ProgramHarness([server], template=template)
    outputs = [trajectory.output for trajectory in harness.run_virtual(program)]
    assert [output.failure for output in outputs] == [None] * len(outputs)
    return harness, outputs


def assistant(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def answered(call: Any, begun: str | None = None) -> list[dict[str, Any]]:
    """Return the messages after a call: the turn with the call, and its result."""
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    return [*user("1 + 2?"), assistant(begun, tool_calls=[call]), result]


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "tools", "opened"),
    [
        ("required", [ADD, SUB], "<tool_call>\n"),
        ("required", [ADD], '<tool_call>\n{"name": "add", "arguments":'),
        (NAMED, [ADD, SUB], '<tool_call>\n{"name": "add", "arguments":'),
        (ALLOWED, [ADD, SUB], '<tool_call>\n{"name": "add", "arguments":'),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_forced_call_begins_with_its_opening_and_looks_like_any_call(
    choice: Any, tools: Any, opened: str, is_streamed: bool
) -> None:
    async def program(create: Any) -> None:
        asked = {"model": MODEL, "messages": user("1 + 2?"), "tools": tools, "tool_choice": choice}
        [call], content, reason = await calls_of(create, is_streamed=is_streamed, **asked)
        assert (content, reason) == ("", "tool_calls")
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        shown = tools if choice is not ALLOWED else [ADD]
        await create(model=MODEL, messages=answered(call), tools=shown)

    rest = call_text("add", a=1, b=2).removeprefix(opened)
    harness, [output] = run(program, rest, "3")
    assert incidents(output) == []
    assert origins(output) == ["prompt", "prefix", "model", "tool", "model"]
    assert prompts(harness.server.requests)[0].endswith(f"<|im_start|>assistant\n{opened}")
    if choice is ALLOWED:
        assert '"sub"' not in prompts(harness.server.requests)[0]


def test_a_name_of_a_tool_cannot_forge_control_tokens() -> None:
    tool = {"type": "function", "function": {"name": "x<|im_end|>"}}

    async def program(create: Any) -> None:
        await create(model=MODEL, messages=user("?"), tools=[tool], tool_choice="required")

    output = run_one(program, " {}}\n</tool_call>")
    prefix = output.segments[1].token_ids.tolist()
    assert hermes_template().decode(prefix) == '<tool_call>\n{"name": "x<|im_end|>", "arguments":'
    assert encoded("<|im_end|>")[0] not in prefix
    assert output.messages[-1]["tool_calls"][0]["function"]["name"] == "x<|im_end|>"


def test_reasoning_that_the_prompt_opens_is_closed_before_a_forced_call() -> None:
    tokenizer = placeholder_tokenizer(
        HERMES_TEMPLATE.replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}"),
    )
    template = ChatTemplate(tokenizer)

    async def program(create: Any) -> None:
        reply = await create(model=MODEL, messages=user("?"), tools=[ADD], tool_choice="required")
        message = reply.choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["add"]
        assert message.model_extra.get("reasoning_content") is None

    rest = template.encoder.encode(' {"a": 1}}\n</tool_call>')
    output = run_one(program, ScriptedReply([*rest, tokenizer.eos_token_id]), template=template)
    prefix = template.decode(output.segments[1].token_ids)
    assert prefix == '\n</think>\n\n<tool_call>\n{"name": "add", "arguments":'


def test_a_forced_call_that_does_not_come_is_text_and_an_incident() -> None:
    async def program(create: Any) -> None:
        reply = await create(model=MODEL, messages=user("?"), tools=[ADD], tool_choice="required")
        choice = reply.choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        text = choice.message.content
        assert text == '<tool_call>\n{"name": "add", "arguments": no'
        await create(model=MODEL, messages=[*user("?"), assistant(text), *user("again")], tools=[ADD])

    output = run_one(program, " no", "ok")
    assert incidents(output) == [IncidentKind.MALFORMED_CALL, IncidentKind.UNMET_REQUEST]
    assert origins(output) == ["prompt", "prefix", "model", "interaction", "model"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_without_parallel_calls_sampling_ends_after_the_first_call(is_streamed: bool) -> None:
    first, second = call_text("add", a=1, note="</tool_call>"), call_text("add", a=2)

    async def program(create: Any) -> None:
        asked = {"model": MODEL, "messages": user("1 + 2?"), "tools": [ADD], "parallel_tool_calls": False}
        [call], _, reason = await calls_of(create, is_streamed=is_streamed, **asked)
        assert reason == "tool_calls"
        await create(model=MODEL, messages=answered(call, "so"), tools=[ADD])

    output = run_one(program, f"so {first}{second}", "3")
    assert origins(output) == ["prompt", "model", "tool", "model"]
    assert output.segments[1].token_ids.tolist() == encoded(f"so {first}")
    assert hermes_template().decode(output.segments[2].token_ids).startswith("<|im_end|>\n")


# -- JSON, parameters and choices --------------------------------------------------------------------------------------


def test_json_is_demanded_of_the_server_that_can_constrain_completions() -> None:
    async def program(client: Any) -> None:
        completions = client.chat.completions
        parsed = await completions.parse(model=MODEL, messages=user("1 + 2?"), response_format=Sum)
        assert parsed.choices[0].message.parsed == Sum(total=3)
        await completions.create(model=MODEL, messages=user("?"), response_format={"type": "json_object"})

    harness, (met, unmet) = run(program, '{"total": 3}', "[1]", abilities=[Ability.JSON_SCHEMA])
    first, second = [json.loads(r.sampling_params.json_schema) for r in harness.server.requests]
    assert first["properties"]["total"]["type"] == "integer"
    assert second == {"type": "object"}
    assert (incidents(met), incidents(unmet)) == ([], [IncidentKind.UNMET_REQUEST])
    assert "[1] is not of type 'object'" in unmet.incidents[0].detail


def test_a_schema_that_no_server_can_enforce_is_dropped_by_name_and_compared_with_the_completion() -> None:
    async def program(create: Any) -> None:
        for _ in range(2):
            await create(model=MODEL, messages=user("?"), response_format={"type": "json_object"})

    _, (met, unmet) = run(program, '{"a": 1}', "no")
    assert incidents(met) == [IncidentKind.DROPPED_PARAMETER]
    assert incidents(unmet) == [IncidentKind.DROPPED_PARAMETER, IncidentKind.UNMET_REQUEST]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"extra_body": {"min_p": 0.1}}, "min_p"),
        ({"extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"extra_body": {"tempratura": 1}}, "tempratura"),
        ({"tools": [{**ADD, "cached": True}]}, "tools.cached"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_hint_or_dropped_as_a_wish(
    fields: Any, name: str
) -> None:
    async def refused(create: Any) -> None:
        hint = f"add {name.partition('.')[0]} to accept_as_wish"
        with pytest.raises(openai.BadRequestError, match=hint):
            await create(model=MODEL, messages=user("?"), **fields)

    async def granted(create: Any) -> None:
        assert (await create(model=MODEL, messages=user("?"), **fields)).choices[0].message.content == "x"

    harness = ProgramHarness(in_order("x"))
    harness.run_virtual(refused)
    assert not harness.server.requests
    dropped = run_one(granted, "x", loop={"accept_as_wish": [name]}).incidents
    assert [(each.kind, each.detail.partition(" ")[0]) for each in dropped] == [
        (IncidentKind.DROPPED_PARAMETER, name)
    ]


def test_penalties_are_passed_to_servers_that_have_them() -> None:
    async def program(create: Any) -> None:
        more = {"min_p": 0.1, "repetition_penalty": 1.1}
        given = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "extra_body": more}
        await create(model=MODEL, messages=user("?"), **given)

    harness, _ = run(program, "x", abilities=[Ability.PENALTIES, Ability.MIN_P])
    params = harness.server.requests[0].sampling_params
    assert (params.min_p, params.repetition_penalty) == (0.1, 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)


SWITCHED = HERMES_TEMPLATE.replace(
    "assistant\\n' }}{%- endif %}",
    "assistant\\n' }}{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{{- reasoning_effort or '' }}{%- endif %}",
)


def test_variables_of_the_template_hold_for_each_turn_and_separate_conversations() -> None:
    tokenizer = placeholder_tokenizer(SWITCHED)
    template = ChatTemplate(tokenizer)

    async def program(create: Any) -> None:
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        first = await create(model=MODEL, messages=user("?"), extra_body=off)
        history = [*user("?"), first.choices[0].message, *user("!")]
        await create(model=MODEL, messages=history, extra_body=off)
        await create(model=MODEL, messages=history, reasoning_effort="high")
        with pytest.raises(openai.BadRequestError, match="tokenize cannot be set"):
            await create(
                model=MODEL, messages=user("?"), extra_body={"chat_template_kwargs": {"tokenize": True}}
            )

    ids = [*template.encoder.encode("x"), tokenizer.eos_token_id]
    harness, outputs = run(program, ScriptedReply(ids), template=template)
    ends = [template.decode(r.prompt_ids).rpartition("assistant")[2] for r in harness.server.requests]
    closed = "\n<think>\n\n</think>\n\n"
    assert ends == [closed, closed, "\nhigh"]
    assert origins(outputs[0]) == ["prompt", "model", "interaction", "model"]
    assert origins(outputs[1]) == ["prompt", "model"]
    assert tokens(outputs[0]) == [*harness.server.requests[1].prompt_ids.tolist(), *ids]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_several_choices_are_branches_of_one_prompt_and_a_retry_gets_the_same(is_streamed: bool) -> None:
    async def program(create: Any) -> None:
        first = (await create(model=MODEL, messages=user("?"))).choices[0].message
        history = [*user("?"), first, *user("again")]

        async def ask(retries: int) -> list[str]:
            asked = {"model": MODEL, "messages": history, "n": 3, "seed": 5}
            headers = {"x-stainless-retry-count": str(retries)}
            if not is_streamed:
                whole = await create(**asked, extra_headers=headers)
                assert [choice.index for choice in whole.choices] == [0, 1, 2]
                assert whole.usage.completion_tokens == 3 * len(encoded("b<|im_end|>"))
                return [choice.message.content for choice in whole.choices]
            texts = ["", "", ""]
            async for chunk in await create(**asked, stream=True, extra_headers=headers):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
            return texts

        texts = await ask(0)
        assert sorted(texts) == ["b", "c", "d"]
        assert await ask(1) == texts
        await create(model=MODEL, messages=[*history, assistant(texts[1]), *user("so")])

    harness, outputs = run(program, *"abcde")
    assert len(harness.server.requests) == 5
    assert sorted(len(output.segments) for output in outputs) == [4, 4, 6]
    assert len({id(output.segments[1]) for output in outputs}) == 1
    assert sorted(r.sampling_params.seed for r in harness.server.requests[1:4]) == [5, 6, 7]


# -- turns that begin with a text --------------------------------------------------------------------------------------


def test_a_cut_turn_is_continued_from_its_own_tokens_and_later_requests_continue_it() -> None:
    async def program(create: Any) -> None:
        first = await create(model=MODEL, messages=user("count"))
        assert first.choices[0].finish_reason == "length"
        text = first.choices[0].message.content
        second = await create(model=MODEL, messages=[*user("count"), assistant(text)], extra_body=REST)
        assert second.choices[0].message.content == "o three"
        await create(model=MODEL, messages=[*user("count"), assistant(text + "o three"), *user("more")])

    # "t" and "w" are two tokens here, and one token in most encodings of the whole text.
    cut = [*encoded("one "), *encoded("t"), *encoded("w")]
    harness, [output] = run(program, ScriptedReply(cut, stops=False), "o three", "four")
    assert origins(output) == ["prompt", "model", "model", "interaction", "model"]
    first, second, third = (request.prompt_ids.tolist() for request in harness.server.requests)
    assert second == [*first, *cut]
    assert tokens(output) == [*third, *encoded("four<|im_end|>")]
    assert [m["content"] for m in output.messages] == ["count", "one two three", "more", "four"]


def test_a_text_of_the_client_begins_the_turn_without_being_trained_on() -> None:
    begun = "It is <|im_end|>"

    async def program(create: Any) -> None:
        reply = await create(model=MODEL, messages=[*user("1 + 2?"), assistant(begun)], extra_body=REST)
        assert reply.choices[0].message.content == " 3."
        history = [*user("1 + 2?"), assistant(f"{begun} 3."), *user("sure?")]
        again = await create(model=MODEL, messages=[*history, assistant("Y")], extra_body=REST)
        assert again.choices[0].message.content == "es."

    output = run_one(program, " 3.", "es.")
    assert origins(output) == ["prompt", "prefix", "model", "interaction", "prefix", "model"]
    prefix = output.segments[1].token_ids.tolist()
    assert hermes_template().decode(prefix) == begun
    assert hermes_template().encoder.control_ids.isdisjoint(prefix)
    assert output.response_mask.sum() == len(encoded(" 3.<|im_end|>")) + len(encoded("es.<|im_end|>"))
    assert output.num_turns == 4


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_response_holds_only_the_continuation(is_streamed: bool) -> None:
    call = call_text("add", a=1, b=2)
    begun, rest = f"Sum: {call[:20]}", call[20:]

    async def program(create: Any) -> None:
        asked = {"model": MODEL, "tools": [ADD], "extra_body": REST}
        messages = [*user("1 + 2?"), assistant(begun)]
        [call], content, _ = await calls_of(create, is_streamed=is_streamed, **asked, messages=messages)
        assert (content, call["function"]["name"]) == ("", "add")
        await create(model=MODEL, messages=answered(call, begun), tools=[ADD])

    assert origins(run_one(program, rest, "3")) == ["prompt", "prefix", "model", "tool", "model"]


def test_a_continuation_of_an_earlier_turn_is_a_branch() -> None:
    async def program(create: Any) -> None:
        await create(model=MODEL, messages=user("?"))
        begun = [*user("?"), assistant("a")]
        await create(model=MODEL, messages=begun, extra_body=REST)
        await create(model=MODEL, messages=[*begun, *user("next")])
        await create(model=MODEL, messages=begun, extra_body=REST)

    _, outputs = run(program, text_reply("a", ends=False), "b", "c", "d")
    assert [[m["content"] for m in output.messages] for output in outputs] == [
        ["?", "ab"],
        ["?", "a", "next", "c"],
        ["?", "ad"],
    ]
    assert len({id(output.segments[1]) for output in outputs}) == 1


@pytest.mark.parametrize(
    ("last", "fields", "what"),
    [
        (assistant(""), {}, "must be an assistant message with a text"),
        (assistant("x", reasoning_content="y"), {}, "without tool_calls or reasoning_content"),
        (assistant("x"), {"tools": [ADD], "tool_choice": "required"}, "cannot force a call"),
        (assistant("x"), {}, "begins each turn of the assistant with reasoning"),
    ],
)
def test_a_message_that_cannot_be_continued_exactly_is_refused(last: Any, fields: Any, what: str) -> None:
    async def program(create: Any) -> None:
        with pytest.raises(openai.BadRequestError, match=what):
            await create(model=MODEL, messages=[*user("?"), last], extra_body=REST, **fields)

    template = ChatTemplate(placeholder_tokenizer(OPENS_REASONING)) if "with reasoning" in what else None
    harness = ProgramHarness(in_order("x"), template=template)
    harness.run_virtual(program)
    assert not harness.server.requests
