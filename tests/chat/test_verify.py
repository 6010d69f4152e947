from __future__ import annotations

import json
import logging

import pytest

from agent_loop.chat.makeshift import makeshift_tokenizer
from agent_loop.chat.report import Cause, Verdict
from agent_loop.chat.template import ChatTemplate
from agent_loop.chat.verify import require_template, verify_template
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


def causes(chat_template: str, *, tools: bool = False) -> tuple[Cause, ...]:
    return verify_template(family(chat_template), tools=tools).causes


def test_a_template_that_appends_is_exact_with_and_without_tools() -> None:
    report = verify_template(small_tokenizer(), tools=True)
    assert report.verdict is report.without_tools is report.with_tools is Verdict.EXACT
    assert report.causes == report.limits == ()


@pytest.mark.parametrize(
    ("chat_template", "cause"),
    [
        (STRIPS_REASONING, Cause.STRIPPED_REASONING),
        (MOVES_SYSTEM, Cause.MOVED_SYSTEM_PROMPT),
        (CALLS_END_OTHERWISE, Cause.END_TOKEN),
        (ARGUMENTS_ARE_TEXT, Cause.GENERATION_PROMPT),
    ],
)
def test_the_cause_of_a_difference_is_named(chat_template: str, cause: Cause) -> None:
    assert cause in causes(chat_template)


@pytest.mark.parametrize("chat_template", [NEXT_ROLE_ENDS_THE_TURN, NINE_LETTER_IDS])
def test_a_family_without_tool_schemas_differs_by_nothing_else(chat_template: str) -> None:
    report = verify_template(family(chat_template), tools=True)
    assert report.without_tools is Verdict.EXACT
    assert report.causes == (Cause.IGNORED_TOOLS,)


def test_what_a_template_refuses_beside_the_essential_is_a_limit() -> None:
    report = verify_template(family(NINE_LETTER_IDS), tools=False)
    assert [(limit.name, limit.verdict) for limit in report.limits] == [
        ("system prompt", Verdict.UNSUPPORTED)
    ]
    assert "no role system" in report.limits[0].error


def test_the_report_shows_the_first_differing_token_and_the_cost() -> None:
    report = verify_template(family(STRIPS_REASONING), tools=False)
    [result] = [result for result in report.results if result.name == "thinking"]
    assert (result.kept, result.is_bridge_exact) == ("<think>", True)
    assert result.num_kept_tokens > 2
    assert json.loads(json.dumps(report.as_dict()))["without_tools"] == "differs"


def test_a_template_that_cannot_write_tool_messages_is_refused_with_the_report() -> None:
    template = family(
        "{{ raise_exception('no tools, please') if messages[-1].role == 'tool' }}" + STRIPS_REASONING
    )
    assert require_template(template, tools=False).with_tools is None
    with pytest.raises(ChatTemplateError, match=r"model\.chat_template_path(.|\n)*no tools, please"):
        require_template(template, tools=True)


def test_a_difference_is_said_once_and_exactness_not_at_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    require_template(hermes_template(), tools=True)
    assert not caplog.records
    require_template(family(STRIPS_REASONING), tools=False)
    [record] = caplog.records
    assert "stripped_reasoning" in record.getMessage()
    assert "nothing is lost" in record.getMessage()


def test_a_date_in_the_prompt_is_noted() -> None:
    dated = "{{ strftime_now('%Y') }}" + STRIPS_REASONING
    assert verify_template(family(dated), tools=False).has_date
    assert not verify_template(hermes_template(), tools=False).has_date


def test_a_makeshift_tokenizer_holds_the_control_tokens_of_its_template() -> None:
    template = ChatTemplate(makeshift_tokenizer(HERMES_TEMPLATE))
    for text in ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_response>"):
        assert len(template.encoder.encode(text)) == 1
    assert verify_template(template, tools=True).verdict is Verdict.EXACT
