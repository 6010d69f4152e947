"""The texts of many runs of tokens at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from agent_loop.chat.template import ChatTemplate
from agent_loop.tracing.forms import TextsOf
from agent_loop.types import IntArray


def decoder_of(template: ChatTemplate) -> TextsOf:
    """What writes tokens out, control tokens included. Threads may share it."""
    token_bytes = template.encoder.token_bytes
    if token_bytes is not None:
        return BytesJoiner(token_bytes)
    # With a tokenizer of its own: one that is changed in one thread while another one uses it raises.
    tokenizer: Any = copy.deepcopy(template.tokenizer.backend_tokenizer)
    return lambda runs: tokenizer.decode_batch([run.tolist() for run in runs], skip_special_tokens=False)


class BytesJoiner:
    """For tokens that are bytes: Arrow joins them, many times faster than Python or a tokenizer.

    Args:
        token_bytes: What each id stands for.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._arrow: Any = import_module("pyarrow")  # takes a moment: only who asks for texts waits for it
        self._num_known = len(token_bytes)
        self._table: Any = self._arrow.array([*token_bytes, b""], self._arrow.large_binary())

    def __call__(self, runs: Sequence[IntArray]) -> list[str]:
        """Ids that stand for nothing are left out."""
        if not sum(map(len, runs)):
            return [""] * len(runs)
        known = np.minimum(np.concatenate(runs), self._num_known)
        _, offsets, joined = self._table.take(self._arrow.array(known)).buffers()
        cuts = np.cumsum([0, *map(len, runs)])
        ends: list[int] = np.frombuffer(offsets, np.int64)[cuts].tolist()
        text = memoryview(joined)
        return [str(text[start:end], "utf-8", "replace") for start, end in pairwise(ends)]
