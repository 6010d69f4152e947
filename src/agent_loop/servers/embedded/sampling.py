"""Sampling of next tokens for many rows at once, with one uniform random number per row, and penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from agent_loop.servers.base import Ability
from agent_loop.types import IntArray, SamplingParams, TokenArrays, top_logprob_arrays

SAMPLING_ABILITIES = frozenset(
    {Ability.LOG_PROBS, Ability.TOP_LOGPROBS, Ability.SEED, Ability.FREE_SEEDS, Ability.MIN_P}
)
"""Abilities that `sample_rows` provides."""
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity among the likeliest tokens, because JSON has no infinity. vLLM has the same value."""
BELOW_ONE = 1.0 - 2.0**-50
"""Factor that keeps a point below the end of the cumulative distribution in spite of rounding."""

CHUNK_ELEMENTS = 2**20
"""Maximum number of logits that a CPU samples from at once, so that all intermediate results stay in its cache."""
BLOCK = 512
"""Tokens of a block of the vocabulary, when a token is drawn."""

_ALL_BITS = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
"""Increment of splitmix64: the odd number next to 2**64 divided by the golden ratio."""


def uniform_stream(seed: int) -> int:
    """Return the stream of a seed, which `uniform_at` takes. Neighbouring seeds give unrelated numbers."""
    return _scrambled((seed + _STEP) & _ALL_BITS)


def uniform_at(stream: int, position: int) -> float:
    """Return the uniform number for the token at `position` of a completion, from 0 to below 1.

    The number depends only on the stream and the position, so a resumed completion draws the same numbers as an
    uninterrupted one. The function is splitmix64 with its counter as the argument.
    """
    return (_scrambled((stream + (position + 1) * _STEP) & _ALL_BITS) >> 11) * 2.0**-53


def _scrambled(bits: int) -> int:
    """Apply the finaliser of splitmix64."""
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _ALL_BITS
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _ALL_BITS
    return bits ^ (bits >> 31)


class SampledRow(NamedTuple):
    """Sampled token of one row."""

    token_id: int
    logprob: float
    """Log-prob as defined by `TokenOutput.log_probs`."""
    is_finite: bool
    """False if the row's logits contain NaN or infinity; the other fields are meaningless then."""
    extras: TokenArrays
    """Further values of the token, without the axis of tokens."""


def sample_rows(
    logits: Tensor, *, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> list[SampledRow]:
    """Sample one token per row.

    The token of a row depends only on its own logits, parameters and uniform number, which selects a token from the
    cumulative distribution.

    Args:
        logits: Shape [rows, vocab].
        params: Parameters of each row.
        uniforms: Uniform number of each row, from 0 to below 1. Ignored for greedy rows.
    """
    if logits.is_cuda and torch.are_deterministic_algorithms_enabled():
        logits = logits.cpu()  # sums along a row have no deterministic kernel on a GPU
    size = max(1, len(logits) if logits.is_cuda else CHUNK_ELEMENTS // logits.shape[-1])
    return [
        row
        for start in range(0, len(logits), size)
        for row in _sample_chunk(
            logits[start : start + size], params[start : start + size], uniforms[start : start + size]
        )
    ]


def _sample_chunk(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> list[SampledRow]:
    logits = logits.float()
    if any(p.temperature not in (0.0, 1.0) for p in params):
        logits = logits / _column([p.temperature or 1.0 for p in params], like=logits)
    all_logprobs = logits.log_softmax(dim=-1)
    is_finite = all_logprobs.amax(dim=-1, keepdim=True).isfinite()  # a NaN anywhere is the largest
    is_greedy = [p.temperature == 0 for p in params]
    if all(is_greedy):
        token_ids = logits.argmax(dim=-1, keepdim=True)
    else:
        token_ids = _draw(all_logprobs, params=params, uniforms=uniforms)
        if any(is_greedy):
            greedy = torch.tensor(is_greedy, device=logits.device).unsqueeze(1)
            token_ids = torch.where(greedy, logits.argmax(dim=-1, keepdim=True), token_ids)
    logprobs = all_logprobs.gather(1, token_ids)
    # One transfer from the device for all three columns. A double can represent any token id.
    columns = torch.cat([column.double() for column in (token_ids, logprobs, is_finite)], dim=1)
    rows: list[tuple[float, float, float]] = cast(Any, columns).tolist()
    extras = _top_logprobs(all_logprobs, params=params)
    return [
        SampledRow(int(token), logprob, bool(finite), arrays)
        for (token, logprob, finite), arrays in zip(rows, extras, strict=True)
    ]


class Penalties:
    """Penalties of one request, and the tokens that they count."""

    def __init__(self, params: SamplingParams, prompt_ids: IntArray) -> None:
        """Count the tokens so far. The last `params.num_sampled` tokens of the prompt belong to the completion."""
        self._params = params
        start = len(prompt_ids) - params.num_sampled
        sampled: list[int] = prompt_ids[start:].tolist()
        self._counts = Counter(sampled)
        has_repetition = params.repetition_penalty != 1.0
        # Placeholders of images have negative ids here.
        self._context = (
            {token for token in prompt_ids.tolist() if token >= 0} if has_repetition else set[int]()
        )

    @classmethod
    def of(cls, params: SamplingParams, prompt_ids: IntArray) -> Penalties | None:
        """Return the penalties of a request; None if it has none."""
        is_plain = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)
        return None if is_plain else cls(params, prompt_ids)

    def accept(self, token_id: int) -> None:
        """Count a sampled token."""
        self._counts[token_id] += 1
        if self._params.repetition_penalty != 1.0:
            self._context.add(token_id)

    def subtract_from(self, logits: Tensor) -> None:
        """Change the logits of one row in place, shape [vocab]."""
        params = self._params
        if params.repetition_penalty != 1.0:
            seen = _index(self._context, like=logits)
            values, factor = logits[seen], params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / factor, values * factor)
        if self._counts:
            counted = _index(self._counts, like=logits)
            counts = torch.tensor(list(self._counts.values()), device=logits.device, dtype=logits.dtype)
            logits[counted] -= params.frequency_penalty * counts + params.presence_penalty


def with_penalties(logits: Tensor, penalties: Sequence[Penalties | None]) -> Tensor:
    """Return logits, [rows, vocab], with the penalties of each row."""
    if not any(each is not None for each in penalties):
        return logits
    changed = logits.to(torch.float32, copy=True)
    for row, each in zip(changed, penalties, strict=True):
        if each is not None:
            each.subtract_from(row)
    return changed


def _index(token_ids: Iterable[int], *, like: Tensor) -> Tensor:
    return torch.tensor(list(token_ids), device=like.device, dtype=torch.int64)


def _top_logprobs(logprobs: Tensor, *, params: Sequence[SamplingParams]) -> list[TokenArrays]:
    """Return the `top_logprobs` likeliest tokens of each row."""
    num_top = [min(p.top_logprobs, logprobs.shape[-1]) for p in params]
    if not any(num_top):
        return [{}] * len(params)
    values, token_ids = logprobs.topk(max(num_top), dim=-1)
    values = values.clamp(min=LOWEST_LOGPROB)
    columns: list[list[list[float]]] = cast(
        Any, torch.stack([token_ids.double(), values.double()], dim=1)
    ).tolist()
    return [
        {name: array[0] for name, array in top_logprob_arrays(ids[:n], row[:n], num_top=n).items()}
        if n
        else {}
        for (ids, row), n in zip(columns, num_top, strict=True)
    ]


def _draw(logprobs: Tensor, *, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    probs = logprobs.exp()
    cut_rows = [row for row, p in enumerate(params) if p.temperature > 0 and _cuts(p)]
    if cut_rows:
        index = torch.tensor(cut_rows, device=probs.device)
        probs[index] = _cut(probs[index], params=[params[row] for row in cut_rows])
    # In blocks, so that no cumulative sum is long: first which block it is, then which of its tokens.
    missing = -probs.shape[-1] % BLOCK
    if missing:
        probs = torch.cat([probs, probs.new_zeros(len(probs), missing)], dim=-1)
    blocks = probs.view(len(probs), -1, BLOCK)
    masses = blocks.sum(dim=-1).double()
    ends = masses.cumsum(dim=-1)
    points = _column(uniforms, like=ends) * BELOW_ONE * ends[:, -1:]
    block = torch.searchsorted(ends, points, right=True).clamp_(max=ends.shape[-1] - 1)
    inner = blocks.take_along_dim(block[..., None], dim=1).squeeze(1).cumsum(dim=-1, dtype=torch.float64)
    rest = (points - (ends - masses).gather(1, block)).clamp_(min=0)
    place = torch.searchsorted(inner, rest.minimum(inner[:, -1:] * BELOW_ONE), right=True)
    return (block * BLOCK + place).clamp_(max=logprobs.shape[-1] - 1)


def _cuts(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _cut(probs: Tensor, *, params: Sequence[SamplingParams]) -> Tensor:
    """Set the probabilities outside top-k, top-p and min-p to zero. The token that crosses `top_p` is kept."""
    ordered, order = probs.sort(dim=-1, descending=True)
    vocab_size = probs.shape[-1]
    top_k = _column([float(p.top_k if p.top_k > 0 else vocab_size) for p in params], like=probs)
    top_p = _column([p.top_p if p.top_p < 1 else 2.0 for p in params], like=probs)
    rank = torch.arange(vocab_size, device=probs.device)
    # Top-p is a share of the probability mass within top-k.
    ordered = ordered * (rank < top_k)
    mass_before = ordered.cumsum(dim=-1) - ordered
    is_kept = mass_before < top_p * ordered.sum(dim=-1, keepdim=True)
    is_kept &= ordered >= _column([p.min_p for p in params], like=probs) * ordered[:, :1]
    return torch.zeros_like(probs).scatter_(1, order, ordered * is_kept)


def _column(values: Sequence[float], *, like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
