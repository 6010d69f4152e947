from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from agent_loop.chat.placeholder_tokenizer import placeholder_tokenizer
from agent_loop.chat.template import ChatTemplate
from agent_loop.chat.verify import Cause, CauseKind, TemplateVerdict, require_template, verify_template
from agent_loop.errors import ChatTemplateError
from tests.chat.families import (
    ARGUMENTS_ARE_TEXT,
    CALLS_END_OTHERWISE,
    NEXT_ROLE_ENDS_THE_TURN,
    NINE_LETTER_IDS,
    family,
)
from tests.helpers import HERMES_TEMPLATE, hermes_template, small_tokenizer

STRIPS_REASONING = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
MOVES_SYSTEM = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- for m in messages if m.role != 'system' -%}
<|{{ m.role }}|>{{ system if loop.last or loop.nextitem is undefined }}{{ m.content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
{%- set unused = '<|user|>' -%}
"""

MANY_HABITS = """\
{%- for m in messages if m.role != 'system' -%}
{%- if m.role == 'tool' %}<|tool|>{{ m.content }}<|end|>
{%- elif m.tool_calls -%}
<|assistant|>{{ m.tool_calls[0].function.arguments | tojson }}<|end|>
{%- elif m.role == 'assistant' -%}
<|assistant|>{{ '[' + m.reasoning_content + ']' if m.reasoning_content and loop.last }}{{ m.content }}
{{- '<|return|>' if loop.last else '<|end|>' }}
{%- else %}<|{{ m.role }}|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{{ '<hm>' if messages[-1].role == 'tool' }}{% endif -%}
{%- set unused = '<|user|>' -%}
"""
ONE_CALL = """\
{{- '<|system|>' + tools | tojson if tools }}
{%- for m in messages -%}
<|{{ m.role }}|>{{ m.content }}
{{- '<call>' + m.tool_calls[0].function.arguments | tojson + '</call>' if m.tool_calls }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
{%- set unused = '<|user|><|tool|>' -%}
"""


def causes(chat_template: str, *, tools: bool = False) -> tuple[Cause, ...]:
    return verify_template(family(chat_template), tools=tools).causes


def test_a_template_that_appends_is_exact_with_and_without_tools() -> None:
    report = verify_template(small_tokenizer(), tools=True)
    assert report.verdict is report.without_tools is report.with_tools is TemplateVerdict.EXACT
    assert report.causes == report.limits == ()


@pytest.mark.parametrize(
    ("chat_template", "cause"),
    [
        (STRIPS_REASONING, Cause.STRIPPED_REASONING),
        (MOVES_SYSTEM, Cause.REWRITTEN_HISTORY),
        (CALLS_END_OTHERWISE, Cause.REWRITTEN_HISTORY),
        (ARGUMENTS_ARE_TEXT, Cause.STRIPPED_REASONING),
    ],
)
def test_the_cause_of_a_difference_is_reported(chat_template: str, cause: Cause) -> None:
    assert cause in causes(chat_template)


@pytest.mark.parametrize(
    ("chat_template", "others"), [(NEXT_ROLE_ENDS_THE_TURN, ()), (NINE_LETTER_IDS, (Cause.DROPPED_TEXT,))]
)
def test_a_family_without_schemas_is_exact_without_tools(chat_template: str, others: Any) -> None:
    report = verify_template(family(chat_template), tools=True)
    assert (report.without_tools, report.with_tools) == (TemplateVerdict.EXACT, TemplateVerdict.DIFFERS)
    assert report.causes == (Cause.IGNORED_TOOLS, *others)


def test_every_cause_is_reported_with_an_example_and_omissions_come_first() -> None:
    report = verify_template(family(MANY_HABITS), tools=True)
    assert report.causes[:3] == (Cause.IGNORED_TOOLS, Cause.IGNORED_SYSTEM_PROMPT, Cause.DROPPED_CALL)
    assert set(report.causes[3:]) == {Cause.DROPPED_TEXT, Cause.STRIPPED_REASONING, Cause.REWRITTEN_HISTORY}
    assert report.kinds() == (CauseKind.LEFT_OUT, CauseKind.REWRITTEN)
    assert report.kinds(tools=False) == (CauseKind.LEFT_OUT, CauseKind.REWRITTEN)
    shown = {cause: report.examples(cause)[0][1] for cause in report.causes}
    assert shown[Cause.IGNORED_SYSTEM_PROMPT].kept == "Answer briefly."
    assert shown[Cause.DROPPED_CALL].kept == "Oslo"
    assert shown[Cause.STRIPPED_REASONING].kept.startswith("[I recall")


def test_omissions_are_reported_even_if_all_tokens_are_equal() -> None:
    results = {result.name: result for result in verify_template(family(ONE_CALL), tools=True).results}
    assert (results["tool"].verdict, results["tool"].causes) == (TemplateVerdict.EXACT, ())
    parallel = results["parallel tools"]
    assert (parallel.position, parallel.num_kept_tokens) == (None, 0)
    assert (parallel.verdict, parallel.causes) == (TemplateVerdict.DIFFERS, (Cause.DROPPED_CALL,))
    assert (parallel.differences[0].kept, parallel.differences[0].is_in_no_render) == ("Oslo", True)


def test_reasoning_that_no_render_contains_is_not_exact() -> None:
    """The tokens are equal, but only the trajectory contains the model's reasoning."""
    drops = family(HERMES_TEMPLATE + "{% set unused = messages[0].reasoning_content %}")
    report = verify_template(drops, tools=False)
    assert report.has_reasoning
    assert report.causes == (Cause.STRIPPED_REASONING,)
    assert all(result.position is None for result in report.results)
    without = verify_template(family(HERMES_TEMPLATE + "{# thinking #}"), tools=True)
    assert not without.has_reasoning
    assert not any("thinking" in result.name for result in without.results)


def test_optional_messages_that_a_template_refuses_are_limits() -> None:
    report = verify_template(family(NINE_LETTER_IDS), tools=False)
    [limit] = report.limits
    assert (limit.name, limit.verdict) == ("system prompt", TemplateVerdict.UNSUPPORTED)
    assert "no role system" in limit.error


def test_the_report_shows_the_first_differing_token_and_the_cost() -> None:
    report = verify_template(family(STRIPS_REASONING), tools=False)
    [result] = [result for result in report.results if result.name == "thinking"]
    [difference] = result.differences
    assert (difference.kept[:7], result.is_bridge_exact) == ("<think>", True)
    assert result.num_kept_tokens > 2
    assert result.position is not None
    assert json.loads(json.dumps(report.as_dict()))["without_tools"] == "differs"


def test_a_template_that_cannot_write_tool_messages_is_refused_with_the_reason() -> None:
    refuses = "{{ raise_exception('no tools, please') if messages[-1].role == 'tool' }}"
    template = family(refuses + STRIPS_REASONING)
    require_template(template, tools=False)
    with pytest.raises(ChatTemplateError, match=r"model\.chat_template_path.*no tools, please"):
        require_template(template, tools=True)


def test_a_template_that_leaves_out_schemas_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    require_template(hermes_template(), tools=True)
    require_template(family(STRIPS_REASONING), tools=False)
    assert not caplog.records
    require_template(family(MANY_HABITS), tools=True)
    [record] = caplog.records
    assert "ignored_tools" in record.getMessage()


def test_a_date_in_the_prompt_is_noted() -> None:
    dated = "{{ strftime_now('%Y') }}" + STRIPS_REASONING
    assert verify_template(family(dated), tools=False).has_date
    assert not verify_template(hermes_template(), tools=False).has_date


def test_a_placeholder_tokenizer_holds_the_control_tokens_of_its_template() -> None:
    template = ChatTemplate(placeholder_tokenizer(HERMES_TEMPLATE))
    for text in ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_response>"):
        assert len(template.encoder.encode(text)) == 1
    assert verify_template(template, tools=True).verdict is TemplateVerdict.EXACT
