"""Random conversations on every chat template that is reported as exact equal their full renders."""

from __future__ import annotations

from random import Random

import pytest

from agent_loop.chat.conversations import encode_conversation
from agent_loop.chat.verify import PROBE_TOOLS, TemplateVerdict
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message, Origin, ToolCall
from tests.chat.test_trl_templates import TEMPLATES, report_of, template_of

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


def conversation(random: Random, *, has_tools: bool, has_reasoning: bool) -> list[Message]:
    """Return a conversation that ends with a reply."""
    messages: list[Message] = [{"role": "system", "content": text(random)}] if random.random() < 0.4 else []
    messages.append({"role": "user", "content": text(random)})
    for _ in range(random.randrange(1, 6)):
        message = assistant_message(random, has_tools=has_tools, has_reasoning=has_reasoning)
        replies: list[Message] = [
            {"role": "tool", "content": text(random), "name": c["function"]["name"], "tool_call_id": c["id"]}
            for c in message.get("tool_calls", ())
        ]
        messages += [message, *(replies or [{"role": "user", "content": text(random)}])]
    return messages


every_template = pytest.mark.parametrize(
    "name",
    [
        name if name in ("qwen3_vl", "lfm2_v2") else pytest.param(name, marks=pytest.mark.slow)
        for name in TEMPLATES
    ],
)


def is_equal(name: str, seed: int, *, has_tools: bool) -> bool | None:
    """Return whether a conversation has the tokens of its full render; None if the template refuses it."""
    report, template = report_of(name), template_of(name)
    tools = PROBE_TOOLS if has_tools else ()
    messages = conversation(Random(seed), has_tools=has_tools, has_reasoning=report.has_reasoning)
    try:
        adapted = [template.bridges.adapted(message) for message in messages]
        rendered = template.renderer.text(adapted, tools=tools, add_generation_prompt=False)
        runs = encode_conversation(template, messages, tools=tools)
    except ChatTemplateError:
        return None
    assert [run.message for run in runs if run.origin is Origin.MODEL] == [
        index for index, message in enumerate(messages) if message["role"] == "assistant"
    ]
    ids = [token_id for run in runs for token_id in run.token_ids.tolist()]
    return template.encoder.encode(rendered)[: len(ids)] == ids


@pytest.mark.nightly(keep=4)
@every_template
@pytest.mark.parametrize("has_tools", [False, True])
def test_conversations_are_encoded_and_equal_for_templates_reported_as_exact(
    name: str, has_tools: bool
) -> None:
    report = report_of(name)
    verdict = report.with_tools if has_tools else report.without_tools
    found = [is_equal(name, seed, has_tools=has_tools) for seed in range(NUM_CONVERSATIONS)]
    if verdict is TemplateVerdict.EXACT:
        assert False not in found
        assert found.count(True) >= NUM_CONVERSATIONS / 2


def test_the_conversations_detect_merged_newlines() -> None:
    assert False in [is_equal("qwen3_8", seed, has_tools=False) for seed in range(NUM_CONVERSATIONS)]
