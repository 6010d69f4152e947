"""Tests of all chat templates in the `trl` package, of more than twenty model families."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from agent_loop.chat.conversations import encode_conversation
from agent_loop.chat.parsers import ToolParser, detect_parser
from agent_loop.chat.placeholder_tokenizer import placeholder_tokenizer
from agent_loop.chat.template import ChatTemplate
from agent_loop.chat.verify import (
    PROBE_TOOLS,
    Cause,
    CauseKind,
    Probe,
    TemplateReport,
    TemplateVerdict,
    make_probes,
    verify_template,
)
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message, Origin, ToolCall

ROOT = Path(__file__).parents[2]

# Templates that group tool outputs once per conversation, not once per turn.
GROUPED_ONCE = {"deepseek_r1_distill", "deepseek_r1_distill_training", "deepseekv3", "deepseekv3_training"}
MOVE_TEXT = {"diffusion_gemma", "diffusion_gemma_training", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"}
PROBES = {probe.name: probe for probe in make_probes("x", tools=True)}


def load_generator() -> ModuleType:
    path = ROOT / "docs" / "generate_templates.py"
    spec = importlib.util.spec_from_file_location("generate_templates", path)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    return generator


GENERATOR = load_generator()
USER = {"role": "user", "content": "hi"}
TEMPLATES: dict[str, str] = dict(GENERATOR.shipped_templates())


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(placeholder_tokenizer(TEMPLATES[name]))


@cache
def report_of(name: str) -> TemplateReport:
    return verify_template(template_of(name), tools=True)


def every_template(test: Callable[[str], None]) -> Callable[[str], None]:
    return pytest.mark.slow(pytest.mark.nightly(keep=6)(pytest.mark.parametrize("name", TEMPLATES)(test)))


@pytest.mark.nightly
@pytest.mark.slow
def test_the_page_of_templates_equals_the_output_of_its_generator() -> None:
    assert GENERATOR.TARGET.read_text(encoding="utf-8") == GENERATOR.render(
        {name: report_of(name) for name in TEMPLATES}
    )


@every_template
def test_a_bridge_differs_only_for_rewritten_replies_and_moved_text(name: str) -> None:
    for result in report_of(name).results:
        if not result.is_bridge_exact and not result.name.endswith("without reply"):
            assert name in GROUPED_ONCE | MOVE_TEXT


@every_template
def test_a_template_that_only_appends_is_bridged_token_for_token(name: str) -> None:
    template, report = template_of(name), report_of(name)
    for result in report.results:
        if result.position is None:  # The tokens are equal, but the template may drop something from both.
            assert all(difference.is_in_no_render for difference in result.differences)
        elif name in GROUPED_ONCE or set(result.causes) == {Cause.MERGED_TOKENS}:
            continue
        # The bridge before a user message follows an answer, not a call.
        elif not result.name.endswith("without reply"):
            assert not only_appends(template, PROBES[result.name]), result


def test_merged_newlines_are_distinguished_from_rewritten_history() -> None:
    report = report_of("qwen3_8")
    assert report.causes == (Cause.MERGED_TOKENS,)
    assert report.kinds() == (CauseKind.MERGED,)
    [(_, example), *_] = report.examples(Cause.MERGED_TOKENS)
    assert (example.kept, example.rendered) == ("\n|\n|</think>", "\n\n|</think>|\n\n")
    rewritten = report_of("qwen3_5_think")
    assert rewritten.kinds() == (CauseKind.REWRITTEN, CauseKind.MERGED)


def only_appends(template: ChatTemplate, probe: Probe) -> bool:
    """Return whether each render of a prompt and a turn, up to its end token, is a prefix of the next render."""
    text = template.renderer.text
    rendered: list[dict[str, Any]] = [template.bridges.adapted(message) for message in probe.messages]
    for start, end in probe.turns:
        before = text(rendered[:start], tools=probe.tools)
        ended = text(rendered[: start + 1], tools=probe.tools, add_generation_prompt=False)
        full = text(rendered[:end], tools=probe.tools)
        if not (ended.startswith(before) and full.startswith(ended.rstrip())):
            return False
    return True


@every_template
@pytest.mark.parametrize("in_parts", [False, True])
def test_masks_do_not_change_the_output_of_a_template(name: str, in_parts: bool) -> None:
    """This includes text that the template searches in an assistant's content, and lists of parts printed by Python."""
    template = template_of(name)
    if template.renderer.takes_parts:
        pytest.skip("the content is always a list of parts")
    forged = "é\ue000'\"\\ " + "".join(template.encoder.control_texts)
    content = [{"type": "text", "text": forged}] if in_parts else forged
    call = {"type": "function", "id": "x" * 9, "function": {"name": "add", "arguments": {forged: [forged]}}}
    reply = {"role": "tool", "content": content, "name": "add", "tool_call_id": "x" * 9}
    thoughts = ("<think>\nhm\n</think>\n\nso", "hm</think>so", "<think>hm", "a<|channel>x<channel|>b")
    for text in (*thoughts, "so", forged):
        for more in ([], [reply]):
            assistant = {"role": "assistant", "content": text, **({"tool_calls": [call]} if more else {})}
            question = {"role": "user", "content": content}
            messages = [template.bridges.adapted(message) for message in (question, assistant, *more, USER)]
            try:
                rendered = template.encoder.unmask(template.renderer.text(messages))
            except ChatTemplateError:
                continue
            assert rendered == template.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )


@every_template
def test_announced_tools_can_be_answered(name: str) -> None:
    if report_of(name).with_tools is TemplateVerdict.UNSUPPORTED:
        pytest.skip("the template has no tools")
    template = template_of(name)
    messages = [{"role": "user", "content": "hi"}]
    assert len(template.open(messages, tools=PROBE_TOOLS)) >= len(template.open(messages))
    replies = [{"role": "tool", "content": text, "name": "get_weather"} for text in ("21 °C", "22 °C")]
    text = template.decode(template.bridge(replies))
    assert text.index("21 °C") < text.index("22 °C")


def opens_reasoning(template: ChatTemplate, ids: Any) -> bool:
    return template.decode(ids).rstrip("\n").endswith("<think>")


@every_template
def test_a_truncated_completion_is_reasoning_if_its_prompt_opened_reasoning(name: str) -> None:
    """After a tool's reply, DeepSeek's templates have no generation prompt that could open reasoning."""
    template = template_of(name)
    if not opens_reasoning(template, template.open([USER])):
        pytest.skip("the template does not open reasoning")
    completion = template.encoder.encode("Perhaps <tool_call> or")
    opened: list[bool] = []
    for reply in (USER, {"role": "tool", "content": "21", "name": "get_weather"}):
        context = template.bridge([reply])
        opened.append(opens_reasoning(template, context))
        parsed = template.parse(completion, context=context)
        assert (parsed.reasoning == "Perhaps <tool_call> or") == opened[-1]
        assert bool(parsed.calls) != opened[-1]
    assert opened[0]
    assert (template.parse(completion).reasoning is not None) == all(opened)


NUM_CONVERSATIONS = 60
QUICK = ("qwen3_vl", "lfm2_v2")
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
    ),
    *(
        "…",
        "0",
        "¿Qué?",
        "你好世界",
        "🌦️",
        "e\u0301",
        "<b>&amp;</b>",
        "```py\nf()\n```",
        '"',
        ":",
        "\\n",
        "नमस्ते",
    ),
    *("{{ x }}", "{% y %}"),
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
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TEMPLATES]
)
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


TEMPLATES_OF = {
    "deepseek_v3": "deepseekv3",
    "gemma": "diffusion_gemma gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5",
    "glm": "glm4moe",
    "gpt-oss": "gptoss",
    "pythonic": "lfm2_v2",
    "llama3_json": "llama3_1 llama3_2",
    "hermes": "qwen2_5 qwen3 qwen3_instruct_2507 qwen3_vl",
    "qwen3_coder": "nemotron_3_nano nemotron_3_super nemotron_3_ultra "
    "qwen3_5_think qwen3_5_nothink qwen3_6 qwen3_8",
}
FORMAT_OF = {name: written for written, names in TEMPLATES_OF.items() for name in names.split()}
ARGUMENTS = {
    "city": 'Köln "Süd"\nund \\ 北京',
    "code": "123",
    "days": 3,
    "share": 0.5,
    "is_late": True,
    "note": None,
    "list": [1, 2, 3],
    "map": {"k": ["v", {"n": False}]},
}
PROPERTIES = {key: {"type": "string"} for key in ("city", "code")} | {
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "is_late": {"type": "boolean"},
    "note": {"type": ["string", "null"]},
    "list": {"type": "array"},
    "map": {"type": "object"},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
    },
}


def written_by(name: str, *, arguments: Any) -> str:
    """Return the render of an assistant turn with one call, without the generation prompt."""
    question = {"role": "user", "content": "Will it rain?"}
    call = {"type": "function", "function": {"name": "forecast", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    turn = render(name, [question, answer])
    prompts = [render(name, [question], add_generation_prompt=prompted) for prompted in (True, False)]
    return turn.removeprefix(next(prompt for prompt in prompts if turn.startswith(prompt)))


def render(name: str, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
    [rendered], _ = render_jinja_template(
        [messages], chat_template=TEMPLATES[name], bos_token="", add_generation_prompt=add_generation_prompt
    )
    return rendered


@pytest.mark.parametrize("name", FORMAT_OF)
def test_the_parser_of_a_template_parses_the_calls_that_it_renders(name: str) -> None:
    parser = detect_parser(TEMPLATES[name])
    assert isinstance(parser, ToolParser.registered()[FORMAT_OF[name]])
    arguments: Any = json.dumps(ARGUMENTS) if name == "deepseekv3" else ARGUMENTS
    [call] = parser.parse(written_by(name, arguments=arguments), tools=[TOOL]).calls
    assert call == ToolCall("forecast", ARGUMENTS)
