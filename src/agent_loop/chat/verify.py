"""Whether what a trajectory holds is what its chat template would render, and if not, why."""

from __future__ import annotations

import logging
import re
from typing import Any

from agent_loop.chat.probes import plain_probes, tool_probes
from agent_loop.chat.report import Kind, TemplateReport, Verdict
from agent_loop.chat.template import ChatTemplate
from agent_loop.chat.trial import Renders, Trial
from agent_loop.errors import ChatTemplateError

MAX_CONTROL_TOKENS = 40
"""So many control tokens are written into a forged reply."""

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_REASONING = re.compile("reasoning|think", re.IGNORECASE)
"""Stands in the source of a template that writes reasoning, or drops it."""

_log = logging.getLogger(__name__)


def verify_template(template: ChatTemplate | Any, *, tools: bool, is_thorough: bool = True) -> TemplateReport:
    """Compare prompt, completion and bridge with a full render, over a set of short conversations.

    The completion is the assistant turn as the template itself writes it, up to where a model would have stopped. Its
    text begins and ends without white space.

    Args:
        template: Or a tokenizer with a chat template.
        tools: Try conversations with tools too.
        is_thorough: Try all conversations, which takes up to some tenths of a second. Otherwise the report calls
            nothing exact.

    Raises:
        ChatTemplateError: The tokenizer has no chat template, or is not a fast one.
    """
    if not isinstance(template, ChatTemplate):
        template = ChatTemplate(template)
    forged = "".join(f"a{text}" for text in template.encoder.control_texts[:MAX_CONTROL_TOKENS])
    source = _COMMENT.sub("", str(template.tokenizer.chat_template))
    has_reasoning = _REASONING.search(source) is not None
    probes = [*plain_probes(forged), *(tool_probes(forged) if tools else [])]
    probes = [
        probe
        for probe in probes
        if (probe.is_quick or is_thorough) and (has_reasoning or not probe.has_reasoning)
    ]
    renders = {probe.has_tools: Renders(template, tools=probe.tools) for probe in probes}
    return TemplateReport(
        results=tuple(Trial(renders[probe.has_tools], probe).result() for probe in probes),
        has_date="strftime_now" in source,
        has_reasoning=has_reasoning,
        is_thorough=is_thorough,
    )


def require_template(template: ChatTemplate, *, tools: bool) -> TemplateReport:
    """Verify a template before it is used, and log what its full render changes or leaves out.

    Raises:
        ChatTemplateError: It cannot write the conversations of a run; the report is in the message.
    """
    report = verify_template(template, tools=tools, is_thorough=False)
    if report.verdict is Verdict.UNSUPPORTED:
        raise ChatTemplateError(
            f"the chat template cannot be used{' with tools' if tools else ''}; "
            f"give another one with model.chat_template_path\n{report}"
        )
    kept = [cause for cause in report.causes if cause.kind is not Kind.LEFT_OUT]
    for cause in report.causes:
        if cause.kind is Kind.LEFT_OUT:
            _log.error("chat template: %s (%s)", cause, cause.meaning)
    if kept:
        _log.warning(
            "a full render of the conversation would differ from what the model saw: %s. "
            "History is never rendered again, so nothing is lost.",
            "; ".join(f"{cause} ({cause.meaning})" for cause in kept),
        )
    return report
