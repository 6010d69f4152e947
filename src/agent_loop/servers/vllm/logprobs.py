"""Log-probs of vLLM: reading them, and finding out by probes which kind a vLLM returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import Any

import numpy as np

from agent_loop.servers.base import Ability
from agent_loop.types import SamplingParams, TokenArrays, top_logprob_arrays

SAMPLING_ABILITIES = frozenset({Ability.LOG_PROBS, Ability.TOP_LOGPROBS})
"""Abilities of a vLLM with exact log-probs."""
CONSTRAINT_ABILITIES = frozenset({Ability.JSON_SCHEMA, Ability.PENALTIES})
"""Abilities of every vLLM that has a tokenizer. Grammars are applied before all kinds of log-probs."""
NUM_TOKENS = 5
"""Number of candidates that a probe requests."""
PROBE_PLAIN = SamplingParams(temperature=1.0, max_tokens=1, seed=0)
PROBE_HOT_TOP_1 = SamplingParams(temperature=2.0, top_k=1, max_tokens=1, seed=0)
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


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Sampled tokens with log-probs and further values per token."""

    token_ids: list[int]
    logprobs: list[float]
    extras: TokenArrays


def num_logprobs(params: SamplingParams) -> int:
    """Return vLLM's parameter `logprobs`: the number of candidates that it returns with each sampled token.

    Over HTTP, vLLM counts the sampled token as a candidate, so one more is needed.
    """
    return params.top_logprobs + 1 if params.top_logprobs else 0


def read_flat(flat: Any, *, params: SamplingParams) -> ScoredTokens:
    """Read the `FlatLogprobs` of a completion, which have the sampled token of each position first.

    Raises:
        ValueError: Positions have different numbers of candidates.
    """
    num_top = params.top_logprobs
    if not num_top:
        return ScoredTokens(list(flat.token_ids), list(flat.logprobs), {})
    shape = (len(flat.start_indices), 1 + num_logprobs(params))
    if len(flat.token_ids) != shape[0] * shape[1]:
        return _read_uneven(flat, num_top=num_top)
    token_ids, logprobs = np.array(flat.token_ids).reshape(shape), np.array(flat.logprobs).reshape(shape)
    top = slice(1, 1 + num_top)
    extras = top_logprob_arrays(token_ids[:, top], logprobs[:, top], num_top=num_top)
    return ScoredTokens(token_ids[:, 0].tolist(), logprobs[:, 0].tolist(), extras)


def _read_uneven(flat: Any, *, num_top: int) -> ScoredTokens:
    """Read `FlatLogprobs` that vLLM joined, in which a sampled token among the likeliest is listed only once."""
    spans = list(zip(flat.start_indices, flat.end_indices, strict=True))
    each = [dict(zip(flat.token_ids[s:e], flat.logprobs[s:e], strict=True)) for s, e in spans]
    top = [sorted(found.items(), key=itemgetter(1), reverse=True)[:num_top] for found in each]
    return ScoredTokens(
        [flat.token_ids[start] for start, _ in spans],
        [flat.logprobs[start] for start, _ in spans],
        top_logprob_arrays(
            [[token for token, _ in found] for found in top],
            [[logprob for _, logprob in found] for found in top],
            num_top=num_top,
        ),
    )


def read_content(content: Sequence[Mapping[str, Any]], *, params: SamplingParams) -> ScoredTokens:
    """Read the log-probs in a reply of `/inference/v1/generate`.

    Raises:
        KeyError, TypeError, ValueError: They have another form.
    """
    token_ids = [int(entry["token_id"]) for entry in content]
    logprobs = [float(entry["logprob"]) for entry in content]
    num_top = params.top_logprobs
    if not num_top:
        return ScoredTokens(token_ids, logprobs, {})
    # The sampled token comes first, wherever it ranks.
    top = [
        sorted(
            [(-float(each["logprob"]), int(each["token_id"])) for each in entry["top_logprobs"]],
            key=itemgetter(0),
        )[:num_top]
        for entry in content
    ]
    extras = top_logprob_arrays(
        [[token for _, token in each] for each in top],
        [[-negative for negative, _ in each] for each in top],
        num_top=num_top,
    )
    return ScoredTokens(token_ids, logprobs, extras)


def _has_penalties(params: SamplingParams) -> bool:
    given = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    return given != (0.0, 0.0, 1.0)


def identify_logprobs(plain: Mapping[int, float], hot_top_1: Mapping[int, float]) -> LogProbs:
    """Return the kind of log-probs that a vLLM returned for two probes of one prompt.

    Args:
        plain: Likeliest tokens with their log-probs, for `PROBE_PLAIN`.
        hot_top_1: Likeliest tokens with their log-probs, for `PROBE_HOT_TOP_1`.
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
