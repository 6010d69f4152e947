"""A rendered text with slots, whose constant text is encoded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.chat.line_cuts import first_line_start, last_line_start
from agent_loop.types import IntArray, as_token_ids


class CachedRender:
    """Token ids of a rendered text with slots, for any texts in the slots.

    The text is cut at anchors, control tokens that are found whatever stands beside them, and at the starts of lines,
    if the tokenizer allows it. A tokenizer encodes the text on the two sides of a cut separately, so that the ids are
    those of the whole text.

    Args:
        parts: The rendered text before, between and after the slots.
        encoder: Encoder of the tokenizer.
    """

    def __init__(self, parts: Sequence[str], *, encoder: ControlledEncoder) -> None:
        self._encoder = encoder
        self._constants: list[IntArray] = []
        self._gaps: list[_Gap] = []
        self._cut(parts)

    def ids(self, texts: Sequence[str]) -> IntArray:
        """Return the token ids with these texts in the slots, shape [num_tokens].

        Args:
            texts: One masked text per slot.
        """
        remaining = iter(texts)
        runs = [self._constants[0]]
        for gap, constant in zip(self._gaps, self._constants[1:], strict=True):
            runs += (gap.ids(remaining, self._encoder), constant)
        return np.concatenate(runs)

    def with_first(self, text: str) -> CachedRender:
        """Return the render with this text in the first slot, so that one slot less is left.

        Args:
            text: A masked text.
        """
        gap, *gaps = self._gaps
        filled = copy(self)
        if len(gap.around) > 2:
            joined = f"{gap.around[0]}{text}{gap.around[1]}"
            merged = _Gap(gap.before, [joined, *gap.around[2:]], gap.after)
            if self._encoder.cuts_lines:
                merged.cut(self._encoder)
            filled._gaps = [merged, *gaps]
            return filled
        first = np.concatenate([self._constants[0], gap.ids(iter([text]), self._encoder), self._constants[1]])
        filled._constants = [first, *self._constants[2:]]
        filled._gaps = gaps
        return filled

    def _cut(self, parts: Sequence[str]) -> None:
        gap: _Gap | None = None
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            spans = self._encoder.anchor_spans(part)
            if not spans and gap is not None:
                gap.around.append(part)
                continue
            if not spans:
                self._add_constant("")
                gap = _Gap("", [part])
                continue
            (start, start_end), (end_start, end) = spans[0], spans[-1]
            if gap is not None:
                gap.around.append(part[:start])
                gap.after = part[start:start_end]
                self._gaps.append(gap)
            self._add_constant(part[0 if gap is None else start : None if is_last else end])
            gap = None if is_last else _Gap(part[end_start:end], [part[end:]])
        if gap is not None:
            self._gaps.append(gap)
            self._add_constant("")
        if self._encoder.cuts_lines:
            for gap in self._gaps:
                gap.cut(self._encoder)

    def _add_constant(self, text: str) -> None:
        self._constants.append(as_token_ids(self._encoder.encode(text)))


@dataclass(slots=True)
class _Gap:
    """Stretch between two anchors that is encoded each time: one or more slots and the text around the slots."""

    before: str
    """Anchor before the stretch; empty at the beginning of the text."""
    around: list[str]
    """Text before, between and after the slots."""
    after: str = ""
    """Anchor after the stretch; empty at the end of the text."""
    start: int = 0
    """Position in the first part before which the token ids do not depend on the slots."""
    end: int | None = None
    """Position in the last part from which on the token ids do not depend on the slots. None if there is none."""
    ids_before: IntArray = field(default_factory=lambda: as_token_ids([]))
    ids_after: IntArray = field(default_factory=lambda: as_token_ids([]))

    def cut(self, encoder: ControlledEncoder) -> None:
        """Encode the text before the first slot and after the last one, where lines start in them."""
        first, last = self.around[0], self.around[-1]
        start, end = last_line_start(first), first_line_start(last)
        if start is not None:
            ids = encoder.encode_cut(first[:start], next_character=first[start])
            if ids is not None:
                self.start, self.ids_before = start, as_token_ids(ids)
        if end is not None:
            ids = encoder.encode_cut(last[end:], next_character="")
            if ids is not None:
                self.end, self.ids_after = end, as_token_ids(ids)

    def ids(self, texts: Iterator[str], encoder: ControlledEncoder) -> IntArray:
        """Return the token ids of the stretch with these texts in its slots, shape [num_tokens]."""
        first, last = self.around[0], self.around[-1]
        filled = "".join(
            [text for around in self.around[1:-1] for text in (next(texts), around)] + [next(texts)]
        )
        if self.start or self.end is not None:
            next_character = "" if self.end is None else last[self.end]
            between = f"{first[self.start :]}{filled}{last[: self.end]}"
            ids = encoder.encode_cut(between, next_character=next_character)
            if ids is not None:
                return np.concatenate([self.ids_before, as_token_ids(ids), self.ids_after])
        whole = f"{first}{filled}{last}"
        return as_token_ids(encoder.encode_between(whole, before=self.before, after=self.after))
