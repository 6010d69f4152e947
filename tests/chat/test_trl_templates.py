"""Tests of all chat templates in the `trl` package, of more than twenty model families."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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
def test_every_template_gets_a_verdict_with_named_causes(name: str) -> None:
    report = report_of(name)
    assert report.without_tools is not TemplateVerdict.UNSUPPORTED
    for result in report.results:
        assert bool(result.error) == (result.verdict is TemplateVerdict.UNSUPPORTED)
        assert bool(result.causes) or result.verdict is not TemplateVerdict.DIFFERS
        assert not result.causes or result.verdict is not TemplateVerdict.EXACT
        assert len(set(result.causes)) == len(result.causes)


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


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", ["gptoss", "lfm2"])
def test_calls_that_a_template_drops_are_reported_and_do_not_change_the_bridge(name: str) -> None:
    report = report_of(name)
    dropped = [result for result, _ in report.examples(Cause.DROPPED_CALL)]
    assert {result.name for result in dropped} >= {"parallel tools", "text and parallel tools"}
    assert all(result.is_bridge_exact for result in dropped)
    assert report.causes[0] is Cause.DROPPED_CALL
    assert report.kinds(tools=True)[0] is CauseKind.LEFT_OUT


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


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "gptoss", "gemma4_v5", "lfm2_2_5"])
def test_reasoning_that_a_template_strips_is_kept_and_reported(name: str) -> None:
    results = {result.name: result for result, _ in report_of(name).examples(Cause.STRIPPED_REASONING)}
    assert results["thinking"].is_bridge_exact
    assert results["thinking"].num_kept_tokens > 0


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
    for text in (
        "<think>\nhm\n</think>\n\nso",
        "hm</think>so",
        "<think>hm",
        "a<|channel>x<channel|>b",
        "so",
        forged,
    ):
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
