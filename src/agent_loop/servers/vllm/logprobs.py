"""Kinds of log-probs that vLLM returns, and finding out by probes which kind a running vLLM returns."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from agent_loop.servers.base import Ability
from agent_loop.types import SamplingParams

SAMPLING_ABILITIES = frozenset({Ability.LOG_PROBS, Ability.TOP_LOGPROBS})
"""Abilities of a vLLM with exact log-probs."""
CONSTRAINT_ABILITIES = frozenset({Ability.JSON_SCHEMA, Ability.PENALTIES})
"""Abilities of every vLLM that has a tokenizer. Grammars are applied before all kinds of log-probs."""
NUM_TOKENS = 5
"""Number of candidates that a probe requests."""
MASKED_LOGPROB = -1e3
"""Tokens with a lower log-prob were masked by top-k or top-p. Over HTTP, minus infinity is -9999."""
TOLERANCE = 0.02


class LogProbs(StrEnum):
    """Distribution that log-probs are taken of."""

    SCALED = "scaled"
    """`log_softmax(logits / temperature)` before top-k and top-p, which defines `TokenOutput.log_probs`."""
    RAW = "raw"
    """`log_softmax(logits)`: vLLM's `raw_logprobs`, its default."""
    PROCESSED = "processed"
    """After temperature, top-k and top-p: vLLM's `processed_logprobs`."""
    UNKNOWN = "unknown"
    """None of these, or the probes cannot distinguish them because the model is too certain or too uncertain."""

    def are_exact(self, params: SamplingParams) -> bool:
        """Return whether they equal `TokenOutput.log_probs` as defined, for these sampling parameters."""
        match self:
            case LogProbs.SCALED:
                return True
            case LogProbs.RAW:
                return params.temperature in (0.0, 1.0) and not _has_penalties(params)
            case LogProbs.PROCESSED:
                return params.temperature == 0.0 or (params.top_p == 1.0 and params.top_k == -1)
            case LogProbs.UNKNOWN:
                return False


def num_logprobs(params: SamplingParams) -> int:
    """Return vLLM's parameter `logprobs`: the number of candidates that it returns with each sampled token.

    Over HTTP, vLLM counts the sampled token as a candidate, so one more is needed.
    """
    return params.top_logprobs + 1 if params.top_logprobs else 0


def _has_penalties(params: SamplingParams) -> bool:
    given = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    return given != (0.0, 0.0, 1.0)


def identify_logprobs(plain: Mapping[int, float], hot_top_1: Mapping[int, float]) -> LogProbs:
    """Return the kind of log-probs that a vLLM returned for two probes of one prompt.

    Args:
        plain: Likeliest tokens with their log-probs, at temperature 1.
        hot_top_1: Likeliest tokens with their log-probs, at temperature 2 with `top_k` 1.
    """
    left = {token: value for token, value in hot_top_1.items() if value > MASKED_LOGPROB}
    if len(left) < len(plain):
        return LogProbs.PROCESSED if len(left) == 1 and max(left.values()) > -TOLERANCE else LogProbs.UNKNOWN
    common = sorted(plain.keys() & left.keys(), key=lambda token: plain[token])
    if len(common) < 2:
        return LogProbs.UNKNOWN
    lowest, highest = common[0], common[-1]
    gap = plain[highest] - plain[lowest]
    hot_gap = left[highest] - left[lowest]
    if gap < 4 * TOLERANCE:
        return LogProbs.UNKNOWN
    for kind, expected in ((LogProbs.RAW, gap), (LogProbs.SCALED, gap / 2)):
        if abs(hot_gap - expected) < TOLERANCE * max(1.0, gap):
            return kind
    return LogProbs.UNKNOWN
