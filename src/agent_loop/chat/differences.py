"""Causes for which a trajectory and a full render of the same messages differ, each with an example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from agent_loop.chat.encoding import ControlledEncoder, num_shared
from agent_loop.chat.probes import MessagePart, TextLandmark
from agent_loop.chat.report import Cause, RenderDifference

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


@dataclass(frozen=True, slots=True)
class RenderComparison:
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


def left_out(landmark: TextLandmark) -> RenderDifference:
    """Return the difference of a part that is in no render."""
    return RenderDifference(_LEFT_OUT[landmark.part], landmark.text[:LEN_EXAMPLE], is_in_no_render=True)


def find_differences(
    comparison: RenderComparison, *, history: str, encoder: ControlledEncoder
) -> Iterator[RenderDifference]:
    """Yield the differences of a comparison; a cause may occur more than once.

    Each text of the messages is searched on both sides. A text that is missing or in another order shows a cause, and
    so does the text between two texts that are adjacent on both sides.

    Args:
        comparison: Comparison whose tokens are not equal.
        history: Text of the prompt up to its generation prompt.
        encoder: Encoder of the tokenizer.
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
    def of(cls, comparison: RenderComparison, history: str, encoder: ControlledEncoder) -> _Boundaries:
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
        """Return the cause of a difference.

        Args:
            position: First position of the trajectory's text that differs.
            before, after: The landmarks around the position. None is the beginning or the end.
            is_reasoning: Whether only one side has a block of reasoning there.
        """
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


def _merged_at_seams(comparison: RenderComparison, encoder: ControlledEncoder) -> Iterator[RenderDifference]:
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
