"""A text with blanks of which all that does not depend on the blanks is tokens already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.types import IntArray, as_token_ids


class EncodedForm:
    """Token ids of a rendered form, whatever stands in its blanks.

    A text is cut where anchors stand only, control tokens that are found in any surroundings: what stands on the two
    sides of one is encoded apart anyway.

    Args:
        parts: The rendered text before, between and behind the blanks.
        encoder: Of the tokenizer.
    """

    def __init__(self, parts: Sequence[str], *, encoder: ControlledEncoder) -> None:
        self._encoder = encoder
        self._constants: list[IntArray] = []
        self._gaps: list[_Gap] = []
        self._cut(parts)

    @classmethod
    def of(cls, parts: Sequence[str] | None, *, encoder: ControlledEncoder) -> EncodedForm | None:
        """The form of these parts; None if there are none."""
        return None if parts is None else cls(parts, encoder=encoder)

    def ids(self, texts: Sequence[str]) -> IntArray:
        """Token ids with these texts, masked as for rendering, in the blanks; shape [num_tokens]."""
        left = iter(texts)
        runs = [self._constants[0]]
        for gap, constant in zip(self._gaps, self._constants[1:], strict=True):
            ids = self._encoder.encode_between(gap.filled(left), before=gap.before, after=gap.after)
            runs += (as_token_ids(ids), constant)
        return np.concatenate(runs)

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

    def _add_constant(self, text: str) -> None:
        self._constants.append(as_token_ids(self._encoder.encode(text)))


@dataclass(slots=True)
class _Gap:
    """What has to be encoded each time: one blank or more, and the text around them up to the next anchors."""

    before: str
    """The anchor before it; nothing at the beginning of the text."""
    around: list[str]
    """The text before, between and behind the blanks."""
    after: str = ""
    """The anchor behind it; nothing at the end of the text."""

    def filled(self, texts: Iterator[str]) -> str:
        written = [self.around[0]]
        for around in self.around[1:]:
            written += (next(texts), around)
        return "".join(written)
