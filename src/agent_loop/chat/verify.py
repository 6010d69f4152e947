"""Whether what a trajectory holds is what its chat template would render, and if not, why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.chat.encoding import num_shared
from agent_loop.chat.probes import CITY, REASONING, TOOL_NAME, Probe, plain_probes, tool_probes
from agent_loop.chat.report import Cause, ProbeResult, TemplateReport, Verdict
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message

MAX_CONTROL_TOKENS = 40
"""So many control tokens are written into a forged reply."""

_log = logging.getLogger(__name__)


def verify_template(template: ChatTemplate | Any, *, tools: bool) -> TemplateReport:
    """Compares prompt, completion and bridge with a full render, over a set of short conversations.

    The completion is the assistant turn as the template itself writes it, up to where a model would have stopped.
    Takes some milliseconds.

    Args:
        template: Or a tokenizer with a chat template.
        tools: Try conversations with tools too.

    Raises:
        ChatTemplateError: The tokenizer has no chat template, or is not a fast one.
    """
    if not isinstance(template, ChatTemplate):
        template = ChatTemplate(template)
    forged = "".join(f"a{text}" for text in template.encoder.control_texts[:MAX_CONTROL_TOKENS])
    probes = [*plain_probes(forged), *(tool_probes(forged) if tools else [])]
    source = str(template.tokenizer.chat_template)
    return TemplateReport(
        results=tuple(_Trial(template, probe).result() for probe in probes),
        has_date="strftime_now" in source,
    )


def require_template(template: ChatTemplate, *, tools: bool) -> TemplateReport:
    """Verifies a template before it is used; logs a warning if its full render differs.

    Raises:
        ChatTemplateError: It cannot write the conversations of a run; the report is in the message.
    """
    report = verify_template(template, tools=tools)
    if report.verdict is Verdict.UNSUPPORTED:
        raise ChatTemplateError(
            f"the chat template cannot be used{' with tools' if tools else ''}; "
            f"give another one with model.chat_template_path\n{report}"
        )
    lossy = [cause for cause in report.causes if cause in (Cause.IGNORED_TOOLS, Cause.DROPPED_CALL)]
    harmless = [cause for cause in report.causes if cause not in lossy]
    if harmless:
        _log.warning(
            "a full render of the conversation would differ from what the model saw: %s. "
            "History is never rendered again, so nothing is lost.",
            "; ".join(f"{cause} ({cause.meaning})" for cause in harmless),
        )
    for cause in lossy:
        _log.warning("chat template: %s (%s)", cause, cause.meaning)
    return report


@dataclass(frozen=True, slots=True)
class _Trial:
    """One probe on one template."""

    template: ChatTemplate
    probe: Probe

    def result(self) -> ProbeResult:
        try:
            return self._compare()
        except ChatTemplateError as error:
            return self._result(Verdict.UNSUPPORTED, error=" ".join(str(error).split()))

    def _compare(self) -> ProbeResult:
        probe, template = self.probe, self.template
        prompt = template.open(self._opening, tools=probe.tools).tolist()
        completion = self._completion()
        last = completion[-1] if completion else None
        bridge = template.bridge(probe.replies, last_token_id=last, calls=probe.calls).tolist()
        kept = [*prompt, *completion, *bridge]
        rendered = template.open([*self._opening, self._said, *self._replies], tools=probe.tools).tolist()
        facts: dict[str, Any] = {
            "num_bridge_tokens": len(bridge),
            "num_kept_tokens": len(kept) - len(rendered),
            "is_bridge_exact": rendered[len(rendered) - len(bridge) :] == bridge,
        }
        if kept == rendered:
            cause = self._loss() or self._cause_when_cut(completion, bridge)
            return self._result(Verdict.DIFFERS if cause else Verdict.EXACT, cause=cause, **facts)
        position = num_shared(kept, rendered)
        return self._result(
            Verdict.DIFFERS,
            cause=self._cause(position, kept, rendered, len(prompt), len(completion)),
            position=position,
            kept=template.decode(kept[position : position + 1]),
            rendered=template.decode(rendered[position : position + 1]),
            **facts,
        )

    @property
    def _opening(self) -> list[Message]:
        return [self.template.replies.written(message) for message in self.probe.opening]

    @property
    def _said(self) -> Message:
        return self.template.replies.written(self.probe.said)

    @property
    def _replies(self) -> list[Message]:
        return self.template.replies.filled(self.probe.replies, calls=self.probe.calls)

    def _completion(self) -> list[int]:
        """What a model would have sampled, if it says what the template writes."""
        before, ended = self._texts()
        shared = before if ended.startswith(before) else self.template.encoder.shared(ended, before)
        ids = self.template.encoder.encode(ended[len(shared) :])
        if (stop := self._stop(ids)) is not None:
            return ids[: stop + 1]
        bridge = self.template.bridge(self.probe.replies, calls=self.probe.calls).tolist()
        # The turn has no close of its own: the model stops at the next role's opening.
        return [*ids, bridge[0]] if bridge[0] in self.template.end_ids else ids

    def _stop(self, ids: Sequence[int]) -> int | None:
        """Where a model would have stopped: at the first of the end tokens with which the turn closes."""
        stop = None
        for position in range(len(ids) - 1, -1, -1):
            if ids[position] in self.template.end_ids:
                stop = position
            elif self.template.decode([ids[position]]).strip():
                break
        return stop

    def _texts(self) -> tuple[str, str]:
        """The prompt, and the conversation when the assistant's turn is over."""
        text, tools = self.template.renderer.text, self.probe.tools
        before = text(self._opening, tools=tools)
        return before, text([*self._opening, self._said], tools=tools, add_generation_prompt=False)

    def _cause_when_cut(self, completion: list[int], bridge: list[int]) -> Cause | None:
        """The bridge of a turn cut just before its end must end it in the same way."""
        stopped = bool(completion) and completion[-1] in self.template.end_ids
        cut = completion[:-1] if stopped else completion
        last = cut[-1] if cut else None
        ids = self.template.bridge(self.probe.replies, last_token_id=last, calls=self.probe.calls).tolist()
        return None if [*cut, *ids] == [*completion, *bridge] else Cause.END_TOKEN

    def _loss(self) -> Cause | None:
        """What the template leaves out of every render."""
        before, ended = self._texts()
        if self.probe.has_tools and TOOL_NAME not in before:
            return Cause.IGNORED_TOOLS
        if self.probe.calls and ended.count(CITY) - before.count(CITY) < len(self.probe.calls):
            return Cause.DROPPED_CALL
        return None

    def _cause(
        self, position: int, kept: Sequence[int], rendered: Sequence[int], num_prompt: int, num_said: int
    ) -> Cause:
        decode = self.template.decode
        kept_text, rendered_text = decode(list(kept)), decode(list(rendered))
        if kept_text == rendered_text:
            return Cause.MERGED_TOKENS
        if REASONING in kept_text and REASONING not in rendered_text:
            return Cause.STRIPPED_REASONING
        if kept_text.count("think>") != rendered_text.count("think>") and position < num_prompt + num_said:
            return Cause.GENERATION_PROMPT if position < num_prompt else Cause.STRIPPED_REASONING
        if position < num_prompt:
            return self._cause_in_prompt(position, decode(list(rendered[position:])))
        if position == num_prompt + num_said - 1:
            return Cause.END_TOKEN
        if position < num_prompt + num_said:
            return Cause.RESERIALISED_CALL
        return Cause.REGROUPED_TOOLS if self.probe.calls else Cause.OTHER

    def _cause_in_prompt(self, position: int, rendered_rest: str) -> Cause:
        opened = self.template.renderer.text(
            self._opening, tools=self.probe.tools, add_generation_prompt=False
        )
        if position >= len(self.template.encoder.encode(opened)):
            return Cause.GENERATION_PROMPT
        if self.probe.opening[-1]["role"] == "tool":
            return Cause.REGROUPED_TOOLS
        first = [str(message["content"]) for message in self.probe.opening if message["role"] == "system"]
        first += [str(tool["function"]["description"]) for tool in self.probe.tools]
        is_moved = any(text in rendered_rest for text in first)
        return Cause.MOVED_SYSTEM_PROMPT if is_moved else Cause.INJECTED_PROMPT

    def _result(self, verdict: Verdict, **facts: Any) -> ProbeResult:
        probe = self.probe
        return ProbeResult(
            name=probe.name,
            has_tools=probe.has_tools,
            is_essential=probe.is_essential,
            verdict=verdict,
            **facts,
        )
