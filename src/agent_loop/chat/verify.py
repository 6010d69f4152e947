"""Check of a chat template: whether a trajectory equals a full render of its messages, and if not, why."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent_loop.chat.conversations import completion_ids
from agent_loop.chat.encoding import num_shared
from agent_loop.chat.probes import (
    PROBE_TOOLS,
    SCHEMA_TEXTS,
    Probe,
    ProbeTurn,
    plain_probes,
    texts_of,
    tool_probes,
)
from agent_loop.chat.report import Cause, ProbeResult, RenderDifference, TemplateReport, TemplateVerdict
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message

MAX_CONTROL_TOKENS = 40
"""Number of control tokens in the text of a hostile reply."""
LEN_EXAMPLE = 32
"""Characters of an example."""
NUM_TOKENS = 3
"""Tokens of an example of merged tokens."""

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_REASONING = re.compile("reasoning|think", re.IGNORECASE)
"""Found in the source of a template that renders or drops reasoning."""

_log = logging.getLogger(__name__)


def verify_template(template: ChatTemplate | Any, *, tools: bool) -> TemplateReport:
    """Compare prompt, completion and bridge with a full render, over a set of short conversations.

    The completion is the assistant turn as the template itself renders it, up to the token at which a model would stop.
    Its text begins and ends without white space.

    Args:
        template: A chat template, or a tokenizer with one.
        tools: Also check conversations with tools.

    Raises:
        ChatTemplateError: The tokenizer has no chat template, or is not fast.
    """
    if not isinstance(template, ChatTemplate):
        template = ChatTemplate(template)
    forged = "".join(f"a{text}" for text in template.encoder.control_texts[:MAX_CONTROL_TOKENS])
    source = _COMMENT.sub("", str(template.tokenizer.chat_template))
    has_reasoning = _REASONING.search(source) is not None
    probes = [*plain_probes(forged), *(tool_probes(forged) if tools else [])]
    probes = [probe for probe in probes if has_reasoning or not probe.has_reasoning]
    return TemplateReport(
        results=tuple(_verify_probe(template, probe) for probe in probes),
        has_date="strftime_now" in source,
        has_reasoning=has_reasoning,
    )


def require_template(template: ChatTemplate, *, tools: bool) -> None:
    """Refuse a template that cannot render the replies of a run, and log what its first prompt leaves out."""
    for joint in (template.bridges.user, *([template.bridges.tool] if tools else [])):
        if isinstance(joint, ChatTemplateError):
            raise ChatTemplateError(
                f"the chat template cannot be used{' with tools' if tools else ''}; "
                f"set model.chat_template_path to another template: {joint}"
            ) from joint
    if not tools:
        return
    question: list[Message] = [{"role": "user", "content": "-"}]
    prompt = template.renderer.text(question, tools=PROBE_TOOLS)
    if any(text not in prompt for _, text in SCHEMA_TEXTS):
        _log.error("chat template: %s (%s)", Cause.IGNORED_TOOLS, Cause.IGNORED_TOOLS.meaning)


def _verify_probe(template: ChatTemplate, probe: Probe) -> ProbeResult:
    checks: list[_TurnCheck] = []
    error = ""
    try:
        checks += (_TurnCheck(template, turn, tools=probe.tools) for turn in probe.turns)
    except ChatTemplateError as refusal:
        error = " ".join(str(refusal).split())
    differences: dict[Cause, RenderDifference] = {}
    for difference in [found for check in checks for found in check.differences]:
        differences.setdefault(difference.cause, difference)
    verdict = TemplateVerdict.DIFFERS if differences else TemplateVerdict.EXACT
    return ProbeResult(
        name=probe.name,
        has_tools=probe.has_tools,
        is_essential=probe.is_essential,
        verdict=TemplateVerdict.UNSUPPORTED if error else verdict,
        differences=tuple(sorted(differences.values(), key=lambda found: list(Cause).index(found.cause))),
        error=error,
        position=next((check.position for check in checks if check.position is not None), None),
        is_bridge_exact=all(check.is_bridge_exact for check in checks),
        num_bridge_tokens=sum(check.num_bridge_tokens for check in checks),
        num_kept_tokens=sum(check.num_kept_tokens for check in checks),
    )


class _TurnCheck:
    """Comparison of a trajectory after one assistant turn and its replies with a full render of the same messages.

    `ProbeResult` describes the public attributes.
    """

    def __init__(
        self, template: ChatTemplate, turn: ProbeTurn, *, tools: Sequence[Mapping[str, Any]]
    ) -> None:
        self._template = template
        self._turn = turn
        self._tools = tools
        opening = [template.bridges.adapted(message) for message in turn.opening]
        said = template.bridges.adapted(turn.said)
        replies = template.bridges.filled(turn.replies, calls=turn.calls)
        self._history = self._text(opening, add_generation_prompt=False)
        self._before = self._text(opening)
        self._ended = self._text([*opening, said], add_generation_prompt=False)
        self._prompt = template.encoder.encode(self._before)
        self._completion = self._sampled()
        self._bridge = bridge = self._bridge_after(self._completion)
        self._kept = kept = [*self._prompt, *self._completion, *bridge]
        self._rendered = rendered = template.encoder.encode(self._text([*opening, said, *replies]))
        self.position = None if kept == rendered else num_shared(kept, rendered)
        self.is_bridge_exact = rendered[len(rendered) - len(bridge) :] == bridge
        self.num_bridge_tokens = len(bridge)
        self.num_kept_tokens = len(kept) - len(rendered)
        self.differences = list(self._left_out())
        if kept != rendered:
            self.differences.append(self._first_difference())
        elif self._is_closed_otherwise():
            self.differences.append(RenderDifference(Cause.END_TOKEN))

    def _text(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        return self._template.renderer.text(
            messages, tools=self._tools, add_generation_prompt=add_generation_prompt
        )

    def _sampled(self) -> list[int]:
        """Return the completion of a model that samples what the template renders."""
        before, ended = self._before, self._ended
        if not ended.startswith(before):
            # The template renders history differently before this turn: start at the last common text before the turn.
            for _, text in reversed(texts_of(self._turn.opening)):
                if text in before and text in ended:
                    before, ended = before[before.rindex(text) :], ended[ended.rindex(text) :]
                    break
        shared = before if ended.startswith(before) else self._template.encoder.shared(ended, before)
        return completion_ids(self._template, ended[len(shared) :], next_id=self._bridge_after([])[0])

    def _bridge_after(self, completion: Sequence[int]) -> list[int]:
        last = completion[-1] if completion else None
        return self._template.bridge(self._turn.replies, last_token_id=last, calls=self._turn.calls).tolist()

    def _is_closed_otherwise(self) -> bool:
        """Return whether the bridge closes a turn that was cut before its end with another token."""
        completion = self._completion
        stopped = bool(completion) and completion[-1] in self._template.end_ids
        cut = completion[:-1] if stopped else completion
        return [*cut, *self._bridge_after(cut)] != [*completion, *self._bridge]

    def _left_out(self) -> Iterator[RenderDifference]:
        """Yield the texts that the template leaves out of every render."""
        system = [found for found in texts_of(self._turn.opening) if found[0] is Cause.IGNORED_SYSTEM_PROMPT]
        expected = [(each, self._before) for each in (*(SCHEMA_TEXTS if self._tools else ()), *system)]
        expected += [(each, self._ended) for each in texts_of([self._turn.said]) if each[1].isascii()]
        for (cause, text), render in expected:
            if text not in render:
                yield RenderDifference(cause, text[:LEN_EXAMPLE], is_in_no_render=True)

    def _first_difference(self) -> RenderDifference:
        """Return the first text or token that differs, with its cause."""
        decode = self._template.decode
        kept, rendered = decode(self._kept), decode(self._rendered)
        if kept == rendered:
            start = num_shared(self._kept, self._rendered)
            first, second = (
                "|".join(decode([token_id]) for token_id in ids[start : start + NUM_TOKENS])
                for ids in (self._kept, self._rendered)
            )
            return RenderDifference(Cause.MERGED_TOKENS, first, second)
        start = num_shared(kept, rendered)
        return RenderDifference(
            self._cause(kept, rendered, start),
            kept[start : start + LEN_EXAMPLE],
            rendered[start : start + LEN_EXAMPLE],
        )

    def _cause(self, kept: str, rendered: str, start: int) -> Cause:
        """Return the cause of a difference that starts at a character of both texts."""
        messages = [*self._turn.opening, self._turn.said, *self._turn.replies]
        for cause, text in (*SCHEMA_TEXTS, *texts_of(messages)):
            if (text in kept) != (text in rendered):
                is_of_prompt = cause in (Cause.IGNORED_SYSTEM_PROMPT, Cause.IGNORED_TOOLS)
                return Cause.REWRITTEN_PROMPT if is_of_prompt else cause
        decode, encode = self._template.decode, self._template.encoder.encode
        prompt = len(decode(self._prompt))
        end_of_turn = prompt + len(decode(self._completion))
        if start < len(decode(encode(self._history))):
            return Cause.REWRITTEN_PROMPT
        if start < prompt:
            return Cause.GENERATION_PROMPT
        if start >= end_of_turn:
            return Cause.REWRITTEN_REPLIES
        if kept.count("think>") != rendered.count("think>"):
            return Cause.STRIPPED_REASONING
        is_last = start >= end_of_turn - len(decode(self._completion[-1:]))
        return Cause.END_TOKEN if is_last else Cause.REWRITTEN_TURN
