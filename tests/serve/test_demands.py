"""Tests of what requests demand of a completion: forced calls, one call, JSON, template variables, several choices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import openai
import pytest
from pydantic import BaseModel

from agent_loop.chat.placeholder_tokenizer import placeholder_tokenizer
from agent_loop.chat.template import ChatTemplate
from agent_loop.servers.base import Ability
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.trajectory import IncidentKind
from tests.helpers import HERMES_TEMPLATE, call_text, encoded, hermes_template, text_reply, user
from tests.serve.harness import ADD, MODEL, ProgramHarness, calls_of, client_of, in_order, origins, prompts

SUB = {"type": "function", "function": {"name": "sub"}}
NAMED = {"type": "function", "function": {"name": "add"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


class Sum(BaseModel):
    total: int


def incidents(trajectory: Any) -> list[tuple[IncidentKind, str]]:
    return [(incident.kind, incident.detail) for incident in trajectory.output.incidents]


def run(
    program: Any, *replies: ScriptedReply, template: Any = None, abilities: Sequence[Ability] = ()
) -> Any:
    server = ScriptedServer(in_order(*replies), streams=True, more_abilities=abilities)
    harness = ProgramHarness([server], template=template)
    trajectories = harness.run_virtual(program)
    assert [t.output.failure for t in trajectories] == [None] * len(trajectories)
    return harness, trajectories


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
        history = [*user("1 + 2?"), {"role": "assistant", "content": None, "tool_calls": [call]}]
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        shown = tools if choice is not ALLOWED else [ADD]
        await create(model=MODEL, messages=[*history, answer], tools=shown)

    rest = call_text("add", a=1, b=2).removeprefix(opened)
    harness, [trajectory] = run(program, text_reply(rest), text_reply("3"))
    assert incidents(trajectory) == []
    assert origins(trajectory.output) == ["prompt", "prefix", "model", "tool", "model"]
    assert prompts(harness.server.requests)[0].endswith(f"<|im_start|>assistant\n{opened}")
    if choice is ALLOWED:
        assert '"sub"' not in prompts(harness.server.requests)[0]


def test_a_name_of_a_tool_cannot_forge_control_tokens() -> None:
    tool = {"type": "function", "function": {"name": "x<|im_end|>"}}

    async def program(create: Any) -> None:
        await create(model=MODEL, messages=user("?"), tools=[tool], tool_choice="required")

    _, [trajectory] = run(program, text_reply(" {}}\n</tool_call>"))
    prefix = trajectory.output.segments[1].token_ids.tolist()
    assert hermes_template().decode(prefix) == '<tool_call>\n{"name": "x<|im_end|>", "arguments":'
    assert encoded("<|im_end|>")[0] not in prefix
    assert trajectory.output.messages[-1]["tool_calls"][0]["function"]["name"] == "x<|im_end|>"


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
    _, [trajectory] = run(program, ScriptedReply([*rest, tokenizer.eos_token_id]), template=template)
    prefix = template.decode(trajectory.output.segments[1].token_ids)
    assert prefix == '\n</think>\n\n<tool_call>\n{"name": "add", "arguments":'


def test_a_forced_call_that_does_not_come_is_text_and_an_incident() -> None:
    async def program(create: Any) -> None:
        reply = await create(model=MODEL, messages=user("?"), tools=[ADD], tool_choice="required")
        choice = reply.choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        text = choice.message.content
        assert text == '<tool_call>\n{"name": "add", "arguments": no'
        history = [*user("?"), {"role": "assistant", "content": text}, *user("again")]
        await create(model=MODEL, messages=history, tools=[ADD])

    _, [trajectory] = run(program, text_reply(" no"), text_reply("ok"))
    assert [kind for kind, _ in incidents(trajectory)] == [
        IncidentKind.MALFORMED_CALL,
        IncidentKind.UNMET_REQUEST,
    ]
    assert origins(trajectory.output) == ["prompt", "prefix", "model", "interaction", "model"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_without_parallel_calls_sampling_ends_after_the_first_call(is_streamed: bool) -> None:
    first, second = call_text("add", a=1, note="</tool_call>"), call_text("add", a=2)

    async def program(create: Any) -> None:
        asked = {"model": MODEL, "messages": user("?"), "tools": [ADD], "parallel_tool_calls": False}
        [call], _, reason = await calls_of(create, is_streamed=is_streamed, **asked)
        assert reason == "tool_calls"
        history = [*user("?"), {"role": "assistant", "content": "so", "tool_calls": [call]}]
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        await create(model=MODEL, messages=[*history, answer], tools=[ADD])

    _, [trajectory] = run(program, text_reply(f"so {first}{second}"), text_reply("3"))
    assert origins(trajectory.output) == ["prompt", "model", "tool", "model"]
    assert trajectory.output.segments[1].token_ids.tolist() == encoded(f"so {first}")
    assert hermes_template().decode(trajectory.output.segments[2].token_ids).startswith("<|im_end|>\n")


def test_json_is_demanded_of_the_server_that_can_constrain_completions() -> None:
    async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        completions = client_of(base_url, api_key, http_client).chat.completions
        parsed = await completions.parse(model=MODEL, messages=user("1 + 2?"), response_format=Sum)
        assert parsed.choices[0].message.parsed == Sum(total=3)
        await completions.create(model=MODEL, messages=user("?"), response_format={"type": "json_object"})

    replies = [text_reply('{"total": 3}'), text_reply("[1]")]
    harness, trajectories = run(program, *replies, abilities=[Ability.JSON_SCHEMA])
    first, second = [json.loads(r.sampling_params.json_schema) for r in harness.server.requests]
    assert first["properties"]["total"]["type"] == "integer"
    assert second == {"type": "object"}
    assert [incidents(t) for t in trajectories] == [
        [],
        [
            (
                IncidentKind.UNMET_REQUEST,
                "response_format: the completion does not match the schema: [1] is not of type 'object'",
            )
        ],
    ]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"extra_body": {"min_p": 0.1}}, "min_p"),
        ({"extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"extra_body": {"tempratura": 1}}, "tempratura"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"tools": [{**ADD, "cached": True}]}, "tools.cached"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_hint_or_dropped_as_a_wish(
    fields: Any, name: str
) -> None:
    is_wish = False

    async def program(create: Any) -> None:
        if is_wish:
            assert (await create(model=MODEL, messages=user("?"), **fields)).choices[0].message.content == "x"
            await create(model=MODEL, messages=user("?"), **fields)
        else:
            hint = f"add {name.partition('.')[0]} to accept_as_wish"
            with pytest.raises(openai.BadRequestError, match=hint):
                await create(model=MODEL, messages=user("?"), **fields)

    harness = ProgramHarness(in_order(text_reply("x")))
    harness.run_virtual(program)
    assert not harness.server.requests
    is_wish = True
    harness = ProgramHarness(in_order(text_reply("x")), loop={"accept_as_wish": [name]})
    trajectories = harness.run_virtual(program)
    assert all(t.output.failure is None for t in trajectories)
    dropped = [
        detail for kind, detail in incidents(trajectories[0]) if kind is IncidentKind.DROPPED_PARAMETER
    ]
    assert [detail.partition(" ")[0] for detail in dropped] == [name]


def test_a_schema_that_no_server_can_enforce_is_dropped_by_name_and_compared_with_the_completion() -> None:
    async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        completions = client_of(base_url, api_key, http_client).chat.completions
        for _ in range(2):
            await completions.create(model=MODEL, messages=user("?"), response_format={"type": "json_object"})

    replies = in_order(text_reply('{"a": 1}'), text_reply("no"))
    first, second = ProgramHarness(replies).run_virtual(program)
    assert [kind for kind, _ in incidents(first)] == [IncidentKind.DROPPED_PARAMETER]
    assert [kind for kind, _ in incidents(second)] == [
        IncidentKind.DROPPED_PARAMETER,
        IncidentKind.UNMET_REQUEST,
    ]


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
    harness, trajectories = run(program, ScriptedReply(ids), template=template)
    ends = [template.decode(r.prompt_ids).rpartition("assistant")[2] for r in harness.server.requests]
    closed = "\n<think>\n\n</think>\n\n"
    assert ends == [closed, closed, "\nhigh"]
    assert [origins(t.output) for t in trajectories] == [
        ["prompt", "model", "interaction", "model"],
        ["prompt", "model"],
    ]
    assert tokens_of(trajectories[0]) == [*harness.server.requests[1].prompt_ids.tolist(), *ids]


def tokens_of(trajectory: Any) -> list[int]:
    return np.concatenate([s.token_ids for s in trajectory.output.segments]).tolist()


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
        await create(
            model=MODEL, messages=[*history, {"role": "assistant", "content": texts[1]}, *user("so")]
        )

    replies = [text_reply(text) for text in "abcd"]
    harness, trajectories = run(program, *replies, text_reply("e"))
    assert len(harness.server.requests) == 5
    assert len(trajectories) == 3
    assert sorted(len(t.output.segments) for t in trajectories) == [4, 4, 6]
    assert len({id(t.output.segments[1]) for t in trajectories}) == 1
    assert sorted(r.sampling_params.seed for r in harness.server.requests[1:4]) == [5, 6, 7]


def test_candidates_and_penalties_are_passed_to_servers_that_have_them() -> None:
    ids = encoded("hi<|im_end|>")
    tops = {
        "top_token_ids": np.array([[token, 20] for token in ids], np.int32),
        "top_logprobs": np.array([[-0.5, -2.0] for _ in ids], np.float32),
    }

    async def program(create: Any) -> None:
        reply = await create(
            model=MODEL,
            messages=user("?"),
            logprobs=True,
            top_logprobs=2,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            extra_body={"min_p": 0.1, "repetition_penalty": 1.1},
        )
        content = reply.choices[0].logprobs.content
        assert [len(token.top_logprobs) for token in content] == [2] * len(ids)
        assert content[0].top_logprobs[0].token == content[0].token
        assert content[0].top_logprobs[1].logprob == -2.0

    abilities = [Ability.TOP_LOGPROBS, Ability.PENALTIES, Ability.MIN_P]
    harness, _ = run(program, ScriptedReply(ids, extras=tops), abilities=abilities)
    params = harness.server.requests[0].sampling_params
    assert (params.top_logprobs, params.min_p, params.repetition_penalty) == (2, 0.1, 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
