"""A rendered text with slots, whose constant text is encoded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.types import IntArray, as_token_ids


class CachedRender:
    """Token ids of a rendered text with slots, for any texts in the slots.

    The text is cut at anchors only: control tokens that are found whatever stands beside them. A tokenizer encodes the
    text on the two sides of a control token separately, so that the ids are those of the whole text.

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
            ids = self._encoder.encode_between(gap.filled(remaining), before=gap.before, after=gap.after)
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
    """Stretch between two anchors that is encoded each time: one or more slots and the text around the slots."""

    before: str
    """Anchor before the stretch; empty at the beginning of the text."""
    around: list[str]
    """Text before, between and after the slots."""
    after: str = ""
    """Anchor after the stretch; empty at the end of the text."""

    def filled(self, texts: Iterator[str]) -> str:
        written = [self.around[0]]
        for around in self.around[1:]:
            written += (next(texts), around)
        return "".join(written)
