"""Reader of `prompt_logprobs`: the log-probs of a prompt's tokens, as vLLM and compatible servers return them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from agent_loop.servers.scores import TokenScores
from agent_loop.types import IntArray

MINUS_INFINITY = -9999.0
"""Stands for minus infinity, which JSON does not have. Lower log-probs are minus infinity too."""


def read_prompt_logprobs(entries: Any, *, token_ids: IntArray, start: int, top_logprobs: int) -> TokenScores:
    """Read the log-probs of a prompt from JSON.

    Each place has an object from token ids to log-probs: the likeliest tokens, and the prompt's own token.

    Args:
        entries: One object per token, null for the first.
        token_ids: The whole prompt, shape [num_tokens].
        start: Index of the first token to read.
        top_logprobs: Number of likeliest tokens to read.
    """
    if len(entries) != len(token_ids):
        raise ValueError(f"{len(entries)} entries for {len(token_ids)} tokens")
    logprobs: list[float] = []
    top: list[Sequence[tuple[int, float]]] = []
    for token_id, entry in zip(token_ids[start:].tolist(), entries[start:], strict=True):
        found = _read(entry)
        logprobs.append(found[token_id])
        top.append(sorted(found.items(), key=itemgetter(1), reverse=True)[:top_logprobs])
    scores = np.array(logprobs, np.float32)
    if not top_logprobs:
        return TokenScores(scores)
    return TokenScores(
        scores,
        np.array([[token for token, _ in place] for place in top], np.int32).reshape(len(top), -1),
        np.array([[logprob for _, logprob in place] for place in top], np.float32).reshape(len(top), -1),
    )


def _read(entry: Mapping[str, Mapping[str, Any]]) -> dict[int, float]:
    logprobs = {int(token): float(fields["logprob"]) for token, fields in entry.items()}
    return {token: value if value > MINUS_INFINITY else -math.inf for token, value in logprobs.items()}
