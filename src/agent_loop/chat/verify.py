"""Check of a chat template: whether a trajectory equals a full render of its messages, and if not, why."""

from __future__ import annotations

import logging
import re
from typing import Any

from agent_loop.chat.probes import plain_probes, tool_probes
from agent_loop.chat.report import CauseKind, TemplateReport, TemplateVerdict
from agent_loop.chat.template import ChatTemplate
from agent_loop.chat.trial import ProbeTrial, Renders
from agent_loop.errors import ChatTemplateError

MAX_CONTROL_TOKENS = 40
"""Number of control tokens in the text of a hostile reply."""

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_REASONING = re.compile("reasoning|think", re.IGNORECASE)
"""Found in the source of a template that renders or drops reasoning."""

_log = logging.getLogger(__name__)


def verify_template(template: ChatTemplate | Any, *, tools: bool, is_thorough: bool = True) -> TemplateReport:
    """Compare prompt, completion and bridge with a full render, over a set of short conversations.

    The completion is the assistant turn as the template itself renders it, up to the token at which a model would stop.
    Its text begins and ends without white space.

    Args:
        template: A chat template, or a tokenizer with one.
        tools: Also check conversations with tools.
        is_thorough: Check all conversations, which takes a few tenths of a second. Otherwise no verdict is `exact`.

    Raises:
        ChatTemplateError: The tokenizer has no chat template, or is not fast.
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
        results=tuple(ProbeTrial(renders[probe.has_tools], probe).result() for probe in probes),
        has_date="strftime_now" in source,
        has_reasoning=has_reasoning,
        is_thorough=is_thorough,
    )


def require_template(template: ChatTemplate, *, tools: bool) -> TemplateReport:
    """Verify a template before a run, and log what a full render would change or leave out.

    Raises:
        ChatTemplateError: The template cannot render the conversations of a run. The message contains the report.
    """
    report = verify_template(template, tools=tools, is_thorough=False)
    if report.verdict is TemplateVerdict.UNSUPPORTED:
        raise ChatTemplateError(
            f"the chat template cannot be used{' with tools' if tools else ''}; "
            f"set model.chat_template_path to another template\n{report}"
        )
    kept = [cause for cause in report.causes if cause.kind is not CauseKind.LEFT_OUT]
    for cause in report.causes:
        if cause.kind is CauseKind.LEFT_OUT:
            _log.error("chat template: %s (%s)", cause, cause.meaning)
    if kept:
        _log.warning(
            "a full render of the conversation would differ from what the model saw: %s. "
            "History is never rendered again, so nothing is lost.",
            "; ".join(f"{cause} ({cause.meaning})" for cause in kept),
        )
    return report
