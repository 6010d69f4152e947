"""Scores of a text: the log-probs that a model gives to its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from agent_loop.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probs of the last M tokens of a text, each given all tokens before it, at temperature 1."""

    logprobs: FloatArray
    """Log-prob of each token, shape [M]."""
    top_ids: IntArray | None = None
    """Ids of the K likeliest tokens at each place, likeliest first, shape [M, K]; None if none were asked for."""
    top_logprobs: FloatArray | None = None
    """Their log-probs, shape [M, K]."""
