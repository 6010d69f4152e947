"""Why a trajectory and a full render of the same messages differ: every cause, each with an example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from agent_loop.chat.encoding import ControlledEncoder, num_shared
from agent_loop.chat.probes import Landmark, Part
from agent_loop.chat.report import Cause, Difference

LEN_EXAMPLE = 32
"""Characters of an example."""
NUM_TOKENS = 3
"""Tokens of an example of merged ones."""

_SAID = (Part.REASONING, Part.TEXT, Part.CALL)
_LEFT_OUT = {
    Part.SYSTEM: Cause.IGNORED_SYSTEM_PROMPT,
    Part.SCHEMA: Cause.IGNORED_TOOLS,
    Part.REASONING: Cause.STRIPPED_REASONING,
    Part.TEXT: Cause.DROPPED_TEXT,
    Part.CALL: Cause.DROPPED_CALL,
}
_MISSING = {
    **_LEFT_OUT,
    Part.SYSTEM: Cause.INJECTED_PROMPT,
    Part.SCHEMA: Cause.INJECTED_PROMPT,
}
"""Where a part stands in a shorter render, or in a longer one, alone."""
_MOVED = {
    Part.SYSTEM: Cause.MOVED_SYSTEM_PROMPT,
    Part.SCHEMA: Cause.MOVED_SYSTEM_PROMPT,
    Part.TEXT: Cause.MOVED_TEXT,
    Part.REASONING: Cause.MOVED_TEXT,
    Part.REPLY: Cause.REGROUPED_TOOLS,
    Part.CALL: Cause.RESERIALISED_CALL,
}
"""Of two parts that change places, the first in this order has moved."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a trajectory holds after an assistant turn and its replies, and a full render of the same messages."""

    prompt: Sequence[int]
    completion: Sequence[int]
    bridge: Sequence[int]
    rendered: Sequence[int]
    landmarks: Sequence[Landmark]

    @property
    def kept(self) -> list[int]:
        """What the trajectory holds."""
        return [*self.prompt, *self.completion, *self.bridge]


def left_out(landmark: Landmark) -> Difference:
    """Return the difference of a part that stands in no render."""
    return Difference(_LEFT_OUT[landmark.part], landmark.text[:LEN_EXAMPLE], is_in_no_render=True)


def find_differences(
    comparison: Comparison, *, history: str, encoder: ControlledEncoder
) -> Iterator[Difference]:
    """Yield why both sides of a comparison differ; a cause may occur more than once.

    Each text of the messages is looked for on both sides. Texts that are missing or in another order name their cause;
    so does what stands between two texts that follow each other on both sides.

    Args:
        comparison: Of tokens that are not equal.
        history: The text of the prompt up to its generation prompt.
        encoder: Of the same tokenizer.
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
    """The text of one side and where the landmarks stand in it."""

    text: str
    order: Sequence[Landmark]
    starts: dict[str, int]
    """By the text of a landmark."""

    @classmethod
    def of(cls, text: str, landmarks: Sequence[Landmark]) -> _Side:
        starts = {mark.text: start for mark in landmarks if (start := text.find(mark.text)) >= 0}
        order = sorted((m for m in landmarks if m.text in starts), key=lambda mark: starts[mark.text])
        return cls(text, order, starts)

    def has(self, landmark: Landmark | None) -> bool:
        """Whether a landmark stands in the text; None is its beginning."""
        return landmark is None or landmark.text in self.starts

    def behind(self, landmark: Landmark | None) -> int:
        """Where the text goes on behind a landmark."""
        return 0 if landmark is None else self.starts[landmark.text] + len(landmark.text)

    def between(self, first: Landmark | None, second: Landmark | None) -> str:
        """What stands between two landmarks; None is the beginning or the end."""
        end = len(self.text) if second is None else self.starts[second.text]
        return self.text[self.behind(first) : end]

    def pairs(self) -> list[tuple[Landmark | None, Landmark | None]]:
        """Landmarks that follow each other."""
        return list(pairwise([None, *self.order, None]))


@dataclass(frozen=True, slots=True)
class _Boundaries:
    """Where the parts of a trajectory's text end, in characters."""

    history: int
    prompt: int
    last_token: int
    """Where the last token of the completion begins."""
    said: int

    @classmethod
    def of(cls, comparison: Comparison, history: str, encoder: ControlledEncoder) -> _Boundaries:
        prompt = len(encoder.decode(comparison.prompt))
        said = prompt + len(encoder.decode(comparison.completion))
        return cls(
            history=len(encoder.decode(encoder.encode(history))),
            prompt=prompt,
            last_token=said - len(encoder.decode(comparison.completion[-1:])),
            said=said,
        )

    def cause(
        self, position: int, before: Landmark | None, after: Landmark | None, *, is_reasoning: bool
    ) -> Cause:
        """Return the cause of a difference.

        Args:
            position: Where the trajectory's text is the first to differ.
            before, after: The landmarks between which it is; None is the beginning or the end.
            is_reasoning: A block of reasoning is there on one side only.
        """
        parts = {mark.part for mark in (before, after) if mark is not None}
        ends_turn = False
        if before is not None and after is not None and before.part in _SAID:
            ends_turn = before.message != after.message and after.part is not Part.REPLY
        if self.history <= position < self.prompt:
            return Cause.GENERATION_PROMPT
        if is_reasoning and position < self.said:
            return Cause.STRIPPED_REASONING
        if ends_turn or self.last_token <= position < self.said:
            return Cause.END_TOKEN
        if Part.REPLY in parts:
            return Cause.REGROUPED_TOOLS
        if self.prompt <= position < self.said or parts.intersection(_SAID):
            return Cause.RESERIALISED_CALL
        return Cause.INJECTED_PROMPT if position < self.prompt else Cause.OTHER


def _missing(kept: _Side, rendered: _Side) -> Iterator[Difference]:
    for side, other in ((kept, rendered), (rendered, kept)):
        for before, mark in side.pairs():
            if mark is not None and not other.has(mark) and other.has(before):
                yield _parting(_MISSING.get(mark.part, Cause.OTHER), kept, rendered, before)


def _moved(kept: _Side, rendered: _Side) -> Iterator[Difference]:
    common = [mark for mark in kept.order if rendered.has(mark)]
    if common == [mark for mark in rendered.order if kept.has(mark)]:
        return
    for first, second in combinations(common, 2):
        if rendered.starts[first.text] > rendered.starts[second.text]:
            parts = {first.part, second.part}
            cause = next((cause for part, cause in _MOVED.items() if part in parts), Cause.OTHER)
            before = common[: common.index(first)][-1:]
            yield _parting(cause, kept, rendered, before[0] if before else None)


def _rewritten(kept: _Side, rendered: _Side, boundaries: _Boundaries) -> Iterator[Difference]:
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
        if ends[0] - 1 > start:  # (the last character that differs may have a cause of its own)
            last = kept.behind(before) + ends[0] - 1
            cause = boundaries.cause(last, before, after, is_reasoning=is_reasoning)
            tails = [text[start:end] for text, end in zip((first, second), ends, strict=True)]
            yield Difference(cause, tails[0][-LEN_EXAMPLE:], tails[1][-LEN_EXAMPLE:])


def _parting(cause: Cause, kept: _Side, rendered: _Side, before: Landmark | None) -> Difference:
    """The difference of a cause, with the first that differs behind a landmark as its example."""
    first, second = (side.text[side.behind(before) :] for side in (kept, rendered))
    position = num_shared(first, second)
    end = position + LEN_EXAMPLE
    return Difference(cause, first[position:end], second[position:end])


def _merged_at_seams(comparison: Comparison, encoder: ControlledEncoder) -> Iterator[Difference]:
    """The tokens that merge where the completion begins or ends, whatever else differs."""
    prompt, completion, bridge = comparison.prompt, comparison.completion, comparison.bridge
    for before, after in ((prompt, completion), (completion, bridge)):
        sides = [list(before[-NUM_TOKENS:]), list(after[:NUM_TOKENS])]
        texts = [encoder.decode(ids) for ids in sides]
        if [encoder.encode(text) for text in texts] != sides:
            continue  # (a character that has more tokens than these, or what only looks like a control token)
        apart, together = [*sides[0], *sides[1]], encoder.encode("".join(texts))
        if apart != together:
            yield _merged(apart, together, encoder)


def _merged(kept: Sequence[int], rendered: Sequence[int], encoder: ControlledEncoder) -> Difference:
    position = num_shared(kept, rendered)

    def shown(ids: Sequence[int]) -> str:
        return "|".join(encoder.decode([token_id]) for token_id in ids[position : position + NUM_TOKENS])

    return Difference(Cause.MERGED_TOKENS, shown(kept), shown(rendered))
