"""Random conversations on every chat template that is reported as exact equal their full renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, TypeAlias

import pytest

from agent_loop.chat.template import ChatTemplate
from agent_loop.chat.verify import PROBE_TOOLS, TemplateVerdict
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message, ToolCall
from tests.chat.test_trl_templates import TEMPLATES, report_of, template_of

AssistantTurn: TypeAlias = tuple[Message, list[Message]]
"""Message of the assistant, and the messages after it."""

NUM_CONVERSATIONS = 60
PIECES = (
    *(
        "so",
        "It is 21 °C.",
        "a\nb",
        "list:\n\n- one\n- two",
        "x = {1: '}'}",
        "why?",
        "\t",
        "  ",
        "\n",
        "\n\n\n",
        "…",
        "0",
    ),
    *(
        "¿Qué?",
        "你好世界",
        "🌦️",
        "e\u0301",
        "<b>&amp;</b>",
        "```py\nf()\n```",
        '"',
        ":",
        "\\n",
        "{{ x }}",
        "{% y %}",
        "नमस्ते",
    ),
)


def text(random: Random, *, most: int = 5) -> str:
    """Return random pieces of text, or the empty text."""
    return "".join(random.choices(PIECES, k=random.randrange(most)))


def assistant_message(random: Random, *, has_tools: bool, has_reasoning: bool) -> Message:
    """Return an assistant message with calls, text, reasoning, any combination of them, or nothing."""
    message: Message = {"role": "assistant", "content": text(random).strip()}
    if has_reasoning and random.random() < 0.4:
        message["reasoning_content"] = text(random).strip() or "hm"
    if has_tools and random.random() < 0.6:
        ids = [f"{random.randrange(10**9):09d}" for _ in range(random.randrange(1, 4))]
        names = [random.choice([("get_weather", "city"), ("get_tides", "port")]) for _ in ids]
        calls = [ToolCall(name, {key: text(random)}, id=i) for (name, key), i in zip(names, ids, strict=True)]
        message["tool_calls"] = [call.as_message() for call in calls]
        if random.random() < 0.5:
            message["content"] = ""
    return message


def conversation(
    random: Random, *, has_tools: bool, has_reasoning: bool
) -> tuple[list[Message], list[AssistantTurn]]:
    """Return the first messages, and the turns."""
    first: list[Message] = [{"role": "system", "content": text(random)}] if random.random() < 0.4 else []
    first.append({"role": "user", "content": text(random)})
    turns: list[AssistantTurn] = []
    for _ in range(random.randrange(1, 6)):
        message = assistant_message(random, has_tools=has_tools, has_reasoning=has_reasoning)
        replies: list[Message] = [
            {"role": "tool", "content": text(random), "name": c["function"]["name"], "tool_call_id": c["id"]}
            for c in message.get("tool_calls", ())
        ]
        if not replies:
            replies = [{"role": "user", "content": text(random)}]
        turns.append((message, replies))
    return first, turns


def completion(template: ChatTemplate, before: str, ended: str) -> list[int]:
    """Return the completion that a model samples for a rendered turn, up to its end token."""
    assert ended.startswith(before)
    ids = template.encoder.encode(ended[len(before) :])
    first_stop = len(ids)
    for index in reversed(range(len(ids))):
        if ids[index] in template.end_ids:
            first_stop = index
        elif template.decode([ids[index]]).strip():
            break
    return ids[: first_stop + 1]


def tokens(
    template: ChatTemplate,
    first: list[Message],
    turns: list[AssistantTurn],
    *,
    tools: Sequence[Mapping[str, Any]],
) -> tuple[list[int], list[int]]:
    """Return the tokens of a whole trajectory, and the tokens of a full render."""
    ids = template.open(first, tools=tools).tolist()
    messages = [template.bridges.adapted(message) for message in first]

    def render(messages: list[Message], *, add_generation_prompt: bool = True) -> str:
        return template.renderer.text(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    for message, replies in turns:
        written = template.bridges.adapted(message)
        ids += completion(
            template, render(messages), render([*messages, written], add_generation_prompt=False)
        )
        calls = [
            ToolCall(c["function"]["name"], c["function"]["arguments"], id=c["id"])
            for c in message.get("tool_calls", ())
        ]
        ids += template.bridge(replies, last_token_id=ids[-1], calls=calls).tolist()
        messages += [written, *template.bridges.filled(replies, calls=calls)]
    return ids, template.encoder.encode(render(messages))


def num_equal(name: str, *, has_tools: bool) -> tuple[int, int]:
    """Return the number of conversations that a template renders, and how many of them are equal."""
    report, template = report_of(name), template_of(name)
    num_written = equal = 0
    for seed in range(NUM_CONVERSATIONS):
        first, turns = conversation(Random(seed), has_tools=has_tools, has_reasoning=report.has_reasoning)
        try:
            kept, rendered = tokens(template, first, turns, tools=PROBE_TOOLS if has_tools else ())
        except ChatTemplateError:
            continue
        num_written += 1
        equal += kept == rendered
    return num_written, equal


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("qwen3_vl", "lfm2_v2") else pytest.param(name, marks=pytest.mark.slow)
        for name in TEMPLATES
    ],
)
def test_no_conversation_differs_for_templates_reported_as_exact(name: str) -> None:
    report = report_of(name)
    for has_tools, verdict in ((False, report.without_tools), (True, report.with_tools)):
        if verdict is TemplateVerdict.EXACT:
            num_written, equal = num_equal(name, has_tools=has_tools)
            assert equal == num_written >= NUM_CONVERSATIONS / 2


@pytest.mark.parametrize("has_tools", [False, True])
def test_the_conversations_detect_merged_newlines(has_tools: bool) -> None:
    num_written, equal = num_equal("qwen3_8", has_tools=has_tools)
    assert equal < num_written
