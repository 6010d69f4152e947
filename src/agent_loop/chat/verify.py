"""Check of a chat template: whether a trajectory equals a full render of its messages, and if not, why."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from agent_loop.chat.conversations import completion_ids
from agent_loop.chat.encoding import ControlledEncoder, num_shared
from agent_loop.chat.probes import (
    PROBE_TOOLS,
    MessagePart,
    Probe,
    ProbeTurn,
    TextLandmark,
    landmarks,
    plain_probes,
    schema_landmarks,
    tool_probes,
)
from agent_loop.chat.report import Cause, ProbeResult, RenderDifference, TemplateReport, TemplateVerdict
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message

MAX_CONTROL_TOKENS = 40
"""Number of control tokens in the text of a hostile reply."""

_SCHEMAS = schema_landmarks()
LEN_EXAMPLE = 32
"""Characters of an example."""
NUM_TOKENS = 3
"""Tokens of an example of merged tokens."""

_SAID = (MessagePart.REASONING, MessagePart.TEXT, MessagePart.CALL)
_LEFT_OUT = {
    MessagePart.SYSTEM: Cause.IGNORED_SYSTEM_PROMPT,
    MessagePart.SCHEMA: Cause.IGNORED_TOOLS,
    MessagePart.REASONING: Cause.STRIPPED_REASONING,
    MessagePart.TEXT: Cause.DROPPED_TEXT,
    MessagePart.CALL: Cause.DROPPED_CALL,
}
_MISSING = {
    **_LEFT_OUT,
    MessagePart.SYSTEM: Cause.INJECTED_PROMPT,
    MessagePart.SCHEMA: Cause.INJECTED_PROMPT,
}
"""Causes of a part that is only in the shorter or only in the longer render."""
_MOVED = {
    MessagePart.SYSTEM: Cause.MOVED_SYSTEM_PROMPT,
    MessagePart.SCHEMA: Cause.MOVED_SYSTEM_PROMPT,
    MessagePart.TEXT: Cause.MOVED_TEXT,
    MessagePart.REASONING: Cause.MOVED_TEXT,
    MessagePart.REPLY: Cause.REGROUPED_TOOLS,
    MessagePart.CALL: Cause.RESERIALISED_CALL,
}
"""Causes of two parts that change places: the first part in this order has moved."""

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
    renders = {probe.has_tools: _Renders(template, tools=probe.tools) for probe in probes}
    return TemplateReport(
        results=tuple(_ProbeTrial(renders[probe.has_tools], probe).result() for probe in probes),
        has_date="strftime_now" in source,
        has_reasoning=has_reasoning,
    )


def require_template(template: ChatTemplate, *, tools: bool) -> None:
    """Refuse a template that cannot render the replies of a run, and log what its first prompt leaves out.

    Raises:
        ChatTemplateError: The template cannot render a reply of a user, or of a tool if the run has tools.
    """
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
    if any(mark.text not in prompt for mark in _SCHEMAS):
        _log.error("chat template: %s (%s)", Cause.IGNORED_TOOLS, Cause.IGNORED_TOOLS.meaning)


class _Renders:
    """Renders of a template. Each conversation is rendered once, since the probes share many."""

    def __init__(self, template: ChatTemplate, *, tools: Sequence[Mapping[str, Any]]) -> None:
        self.template = template
        self._tools = tools
        self._texts: dict[tuple[str, bool], str] = {}
        self._ids: dict[str, list[int]] = {}

    def text(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the rendered text of messages."""
        key = (repr(messages), add_generation_prompt)
        if key not in self._texts:
            self._texts[key] = self.template.renderer.text(
                messages, tools=self._tools, add_generation_prompt=add_generation_prompt
            )
        return self._texts[key]

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of rendered messages."""
        key = repr(messages)
        if key not in self._ids:
            self._ids[key] = self.template.encoder.encode(self.text(messages))
        return self._ids[key]


@dataclass(frozen=True, slots=True)
class _ProbeTrial:
    """Check of one probe on one template."""

    renders: _Renders
    probe: Probe

    def result(self) -> ProbeResult:
        differences: dict[Cause, RenderDifference] = {}
        outcomes: list[_Outcome] = []
        error = ""
        try:
            for turn in self.probe.turns:
                trial = _ProbeTurnTrial(self.renders, self.probe, turn)
                outcomes.append(trial.outcome())
        except ChatTemplateError as refusal:
            error = " ".join(str(refusal).split())
        for difference in [found for outcome in outcomes for found in outcome.differences]:
            differences.setdefault(difference.cause, difference)
        verdict = TemplateVerdict.DIFFERS if differences else TemplateVerdict.EXACT
        return ProbeResult(
            name=self.probe.name,
            has_tools=self.probe.has_tools,
            is_essential=self.probe.is_essential,
            verdict=TemplateVerdict.UNSUPPORTED if error else verdict,
            differences=tuple(sorted(differences.values(), key=lambda found: list(Cause).index(found.cause))),
            error=error,
            position=next((o.position for o in outcomes if o.position is not None), None),
            is_bridge_exact=all(outcome.is_bridge_exact for outcome in outcomes),
            num_bridge_tokens=sum(outcome.num_bridge_tokens for outcome in outcomes),
            num_kept_tokens=sum(outcome.num_kept_tokens for outcome in outcomes),
        )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Result of one turn. See `ProbeResult`."""

    differences: Sequence[RenderDifference]
    position: int | None
    is_bridge_exact: bool
    num_bridge_tokens: int
    num_kept_tokens: int


@dataclass(frozen=True, slots=True)
class _ProbeTurnTrial:
    """Check of one turn of a probe on one template."""

    renders: _Renders
    probe: Probe
    turn: ProbeTurn

    def outcome(self) -> _Outcome:
        """Compare the tokens of a trajectory after the turn with a full render."""
        turn, template = self.turn, self.renders.template
        opening = [template.bridges.adapted(message) for message in turn.opening]
        said = template.bridges.adapted(turn.said)
        replies = template.bridges.filled(turn.replies, calls=turn.calls)
        before = self.renders.text(opening)
        ended = self.renders.text([*opening, said], add_generation_prompt=False)
        completion = self._completion(before, ended)
        bridge = self._bridge(completion)
        comparison = _RenderComparison(
            prompt=self.renders.ids(opening),
            completion=completion,
            bridge=bridge,
            rendered=self.renders.ids([*opening, said, *replies]),
            landmarks=[*_SCHEMAS, *landmarks([*turn.opening, turn.said, *turn.replies])],
        )
        kept, rendered = comparison.kept, list(comparison.rendered)
        differences = list(self._left_out(before, ended))
        if kept != rendered:
            history = self.renders.text(opening, add_generation_prompt=False)
            differences += _find_differences(comparison, history=history, encoder=template.encoder)
        elif self._is_closed_otherwise(completion, bridge):
            differences.append(RenderDifference(Cause.END_TOKEN))
        return _Outcome(
            differences,
            position=None if kept == rendered else num_shared(kept, rendered),
            is_bridge_exact=rendered[len(rendered) - len(bridge) :] == bridge,
            num_bridge_tokens=len(bridge),
            num_kept_tokens=len(kept) - len(rendered),
        )

    def _left_out(self, before: str, ended: str) -> Iterator[RenderDifference]:
        """Yield the texts that the template leaves out of every render."""
        system = [mark for mark in landmarks(self.turn.opening) if mark.part is MessagePart.SYSTEM]
        for mark in (*(_SCHEMAS if self.probe.has_tools else ()), *system):
            if mark.text not in before:
                yield _left_out_of_renders(mark)
        for mark in landmarks([self.turn.said]):
            if mark.text.isascii() and mark.text not in ended:
                yield _left_out_of_renders(mark)

    def _completion(self, before: str, ended: str) -> list[int]:
        """Return the completion of a model that samples what the template renders."""
        template = self.renders.template
        if not ended.startswith(before):
            # The template renders history differently before this turn: start at the last common text before the turn.
            for mark in reversed(landmarks(self.turn.opening)):
                if mark.text in before and mark.text in ended:
                    before, ended = before[before.rindex(mark.text) :], ended[ended.rindex(mark.text) :]
                    break
        shared = before if ended.startswith(before) else template.encoder.shared(ended, before)
        return completion_ids(template, ended[len(shared) :], next_id=self._bridge([])[0])

    def _bridge(self, completion: Sequence[int]) -> list[int]:
        last = completion[-1] if completion else None
        template = self.renders.template
        return template.bridge(self.turn.replies, last_token_id=last, calls=self.turn.calls).tolist()

    def _is_closed_otherwise(self, completion: list[int], bridge: list[int]) -> bool:
        """Return whether the bridge closes a turn that was cut before its end with another token."""
        stopped = bool(completion) and completion[-1] in self.renders.template.end_ids
        cut = completion[:-1] if stopped else completion
        return [*cut, *self._bridge(cut)] != [*completion, *bridge]


@dataclass(frozen=True, slots=True)
class _RenderComparison:
    """Tokens of a trajectory after an assistant turn and its replies, and of a full render of the same messages."""

    prompt: Sequence[int]
    completion: Sequence[int]
    bridge: Sequence[int]
    rendered: Sequence[int]
    landmarks: Sequence[TextLandmark]

    @property
    def kept(self) -> list[int]:
        """All tokens of the trajectory."""
        return [*self.prompt, *self.completion, *self.bridge]


def _left_out_of_renders(landmark: TextLandmark) -> RenderDifference:
    """Return the difference of a part that is in no render."""
    return RenderDifference(_LEFT_OUT[landmark.part], landmark.text[:LEN_EXAMPLE], is_in_no_render=True)


def _find_differences(
    comparison: _RenderComparison, *, history: str, encoder: ControlledEncoder
) -> Iterator[RenderDifference]:
    """Yield the differences of a comparison; a cause may occur more than once.

    Each text of the messages is searched on both sides. A text that is missing or in another order shows a cause, and
    so does the text between two texts that are adjacent on both sides.
    """
    kept = _Side.of(encoder.decode(comparison.kept), comparison.landmarks)
    rendered = _Side.of(encoder.decode(comparison.rendered), comparison.landmarks)
    if kept.text == rendered.text:
        yield _merged(comparison.kept, comparison.rendered, encoder)
        return
    boundaries = _Boundaries.of(comparison, history, encoder)
    found = [
        *_missing(kept, rendered),
        *_moved(kept, rendered),
        *_rewritten(kept, rendered, boundaries),
    ]
    if not found:
        position = num_shared(kept.text, rendered.text)
        found = [_parting(boundaries.cause(position, None, None, is_reasoning=False), kept, rendered, None)]
    yield from found
    if all(difference.cause is not Cause.GENERATION_PROMPT for difference in found):
        yield from _merged_at_seams(comparison, encoder)


@dataclass(frozen=True, slots=True)
class _Side:
    """Text of one side, with the positions of the landmarks."""

    text: str
    order: Sequence[TextLandmark]
    starts: dict[str, int]
    """Positions by the text of the landmark."""

    @classmethod
    def of(cls, text: str, landmarks: Sequence[TextLandmark]) -> _Side:
        starts = {mark.text: start for mark in landmarks if (start := text.find(mark.text)) >= 0}
        order = sorted((m for m in landmarks if m.text in starts), key=lambda mark: starts[mark.text])
        return cls(text, order, starts)

    def has(self, landmark: TextLandmark | None) -> bool:
        """Return whether the text contains a landmark. None is the beginning of the text."""
        return landmark is None or landmark.text in self.starts

    def behind(self, landmark: TextLandmark | None) -> int:
        """Return the position after a landmark."""
        return 0 if landmark is None else self.starts[landmark.text] + len(landmark.text)

    def between(self, first: TextLandmark | None, second: TextLandmark | None) -> str:
        """Return the text between two landmarks. None is the beginning or the end."""
        end = len(self.text) if second is None else self.starts[second.text]
        return self.text[self.behind(first) : end]

    def pairs(self) -> list[tuple[TextLandmark | None, TextLandmark | None]]:
        """Return all pairs of adjacent landmarks."""
        return list(pairwise([None, *self.order, None]))


@dataclass(frozen=True, slots=True)
class _Boundaries:
    """Ends of the parts of a trajectory's text, in characters."""

    history: int
    prompt: int
    last_token: int
    """Start of the last token of the completion."""
    said: int

    @classmethod
    def of(cls, comparison: _RenderComparison, history: str, encoder: ControlledEncoder) -> _Boundaries:
        prompt = len(encoder.decode(comparison.prompt))
        said = prompt + len(encoder.decode(comparison.completion))
        return cls(
            history=len(encoder.decode(encoder.encode(history))),
            prompt=prompt,
            last_token=said - len(encoder.decode(comparison.completion[-1:])),
            said=said,
        )

    def cause(
        self, position: int, before: TextLandmark | None, after: TextLandmark | None, *, is_reasoning: bool
    ) -> Cause:
        """Return the cause of a difference."""
        parts = {mark.part for mark in (before, after) if mark is not None}
        ends_turn = False
        if before is not None and after is not None and before.part in _SAID:
            ends_turn = before.message != after.message and after.part is not MessagePart.REPLY
        if self.history <= position < self.prompt:
            return Cause.GENERATION_PROMPT
        if is_reasoning and position < self.said:
            return Cause.STRIPPED_REASONING
        if ends_turn or self.last_token <= position < self.said:
            return Cause.END_TOKEN
        if MessagePart.REPLY in parts:
            return Cause.REGROUPED_TOOLS
        if self.prompt <= position < self.said or parts.intersection(_SAID):
            return Cause.RESERIALISED_CALL
        return Cause.INJECTED_PROMPT if position < self.prompt else Cause.OTHER


def _missing(kept: _Side, rendered: _Side) -> Iterator[RenderDifference]:
    for side, other in ((kept, rendered), (rendered, kept)):
        for before, mark in side.pairs():
            if mark is not None and not other.has(mark) and other.has(before):
                yield _parting(_MISSING.get(mark.part, Cause.OTHER), kept, rendered, before)


def _moved(kept: _Side, rendered: _Side) -> Iterator[RenderDifference]:
    common = [mark for mark in kept.order if rendered.has(mark)]
    if common == [mark for mark in rendered.order if kept.has(mark)]:
        return
    for first, second in combinations(common, 2):
        if rendered.starts[first.text] > rendered.starts[second.text]:
            parts = {first.part, second.part}
            cause = next((cause for part, cause in _MOVED.items() if part in parts), Cause.OTHER)
            before = common[: common.index(first)][-1:]
            yield _parting(cause, kept, rendered, before[0] if before else None)


def _rewritten(kept: _Side, rendered: _Side, boundaries: _Boundaries) -> Iterator[RenderDifference]:
    rendered_pairs = rendered.pairs()
    for before, after in kept.pairs():
        if (before, after) not in rendered_pairs:
            continue
        first, second = kept.between(before, after), rendered.between(before, after)
        if first == second:
            continue
        start, num_alike = num_shared(first, second), num_shared(first[::-1], second[::-1])
        ends = [max(start, len(text) - num_alike) for text in (first, second)]
        is_reasoning = first.count("think>") != second.count("think>")
        cause = boundaries.cause(kept.behind(before) + start, before, after, is_reasoning=is_reasoning)
        yield _parting(cause, kept, rendered, before)
        if ends[0] - 1 > start:  # the last character that differs may have another cause
            last = kept.behind(before) + ends[0] - 1
            cause = boundaries.cause(last, before, after, is_reasoning=is_reasoning)
            tails = [text[start:end] for text, end in zip((first, second), ends, strict=True)]
            yield RenderDifference(cause, tails[0][-LEN_EXAMPLE:], tails[1][-LEN_EXAMPLE:])


def _parting(cause: Cause, kept: _Side, rendered: _Side, before: TextLandmark | None) -> RenderDifference:
    """Return the difference of a cause. The example is the first text that differs after a landmark."""
    first, second = (side.text[side.behind(before) :] for side in (kept, rendered))
    position = num_shared(first, second)
    end = position + LEN_EXAMPLE
    return RenderDifference(cause, first[position:end], second[position:end])


def _merged_at_seams(comparison: _RenderComparison, encoder: ControlledEncoder) -> Iterator[RenderDifference]:
    """Yield the tokens that merge where the completion begins or ends, independent of other differences."""
    prompt, completion, bridge = comparison.prompt, comparison.completion, comparison.bridge
    for before, after in ((prompt, completion), (completion, bridge)):
        sides = [list(before[-NUM_TOKENS:]), list(after[:NUM_TOKENS])]
        texts = [encoder.decode(ids) for ids in sides]
        if [encoder.encode(text) for text in texts] != sides:
            continue  # a character of more tokens than these, or text that only looks like a control token
        apart, together = [*sides[0], *sides[1]], encoder.encode("".join(texts))
        if apart != together:
            yield _merged(apart, together, encoder)


def _merged(kept: Sequence[int], rendered: Sequence[int], encoder: ControlledEncoder) -> RenderDifference:
    position = num_shared(kept, rendered)

    def shown(ids: Sequence[int]) -> str:
        return "|".join(encoder.decode([token_id]) for token_id in ids[position : position + NUM_TOKENS])

    return RenderDifference(Cause.MERGED_TOKENS, shown(kept), shown(rendered))
