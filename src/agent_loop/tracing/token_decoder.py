"""Decoding of many runs of tokens at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from agent_loop.chat.template import ChatTemplate
from agent_loop.tracing.json_traces import TokenDecoder
from agent_loop.types import IntArray


def make_token_decoder(template: ChatTemplate) -> TokenDecoder:
    """Return a thread-safe function that decodes token ids, control tokens included."""
    token_bytes = template.encoder.token_bytes
    if token_bytes is not None:
        return BytesDecoder(token_bytes)
    # A copy, because a tokenizer raises if one thread changes it while another thread uses it.
    tokenizer: Any = copy.deepcopy(template.tokenizer.backend_tokenizer)
    return lambda runs: tokenizer.decode_batch([run.tolist() for run in runs], skip_special_tokens=False)


class BytesDecoder:
    """Decoder for byte-level tokens. Arrow joins the bytes, many times faster than Python or a tokenizer.

    Args:
        token_bytes: Bytes of each token id.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._arrow: Any = import_module("pyarrow")  # late: the import is slow, and only texts need it
        self._num_known = len(token_bytes)
        self._table: Any = self._arrow.array([*token_bytes, b""], self._arrow.large_binary())

    def __call__(self, runs: Sequence[IntArray]) -> list[str]:
        """Return the text of each run. Unknown ids are skipped."""
        if not sum(map(len, runs)):
            return [""] * len(runs)
        known = np.minimum(np.concatenate(runs), self._num_known)
        _, offsets, joined = self._table.take(self._arrow.array(known)).buffers()
        cuts = np.cumsum([0, *map(len, runs)])
        ends: list[int] = np.frombuffer(offsets, np.int64)[cuts].tolist()
        text = memoryview(joined)
        return [str(text[start:end], "utf-8", "replace") for start, end in pairwise(ends)]
