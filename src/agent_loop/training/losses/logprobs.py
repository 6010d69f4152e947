"""Log-probs and entropy of tokens: from logits, or from the inputs of a linear head in blocks of the vocabulary.

With blocks, no tensor holds the logits of all positions: the backward pass computes the logits of each block again. The
gradient of each weight is one product over all positions, as without blocks.

N positions, M tokens, K candidates, P pairs of a position and a token, V tokens of the vocabulary, D blocks, C tokens
of a block, I inputs of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import checkpoint


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Log-probs of tokens, and entropies in nats. All are float32, or float64 if the logits are float64."""

    sampled_M: Tensor
    entropy_M: Tensor
    """Entropy of the distribution of each token."""
    candidates_MK: Tensor | None = None
    """Log-probs of the candidates in place of each token; None if there were no candidates."""


def token_logprobs(
    logits_NV: Tensor,
    *,
    token_ids_M: Tensor,
    place_M: Tensor,
    temperature: float,
    entropy_has_gradient: bool = True,
    candidate_ids_MK: Tensor | None = None,
) -> TokenLogProbs:
    """Return `log_softmax(logits / temperature)` at the tokens, and the entropy of the distributions.

    `place_M` is the index of each token's distribution, among the N. Without `entropy_has_gradient`, the entropy is for
    metrics only.
    """
    precise_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    logprobs_NV = (precise_NV if temperature == 1 else precise_NV / temperature).log_softmax(dim=-1)
    entropy_N = entropy(logprobs_NV if entropy_has_gradient else logprobs_NV.detach())
    return TokenLogProbs(
        logprobs_NV[place_M, token_ids_M],
        entropy_N[place_M],
        None if candidate_ids_MK is None else logprobs_NV[place_M.unsqueeze(-1), candidate_ids_MK],
    )


def entropy(logprobs_NV: Tensor) -> Tensor:
    """Return the entropy of each distribution in nats; [N]."""
    lowest = torch.finfo(logprobs_NV.dtype).min  # finite, so that a probability of 0 adds 0 and not NaN
    return -(logprobs_NV.exp() * logprobs_NV.clamp(min=lowest)).sum(dim=-1)


BLOCK_ELEMENTS = {"cpu": 2**20}
"""Logits of a block by the type of the device. A CPU is fastest if a block fits into its cache."""
OTHER_BLOCK_ELEMENTS = 2**26
MIN_BLOCK = 256
"""Minimum number of tokens in a block."""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Function that a model applies to each output of its head: a factor, then a soft cap."""

    factor: float = 1.0
    soft_cap: float | None = None
    """Bound that logits approach: `soft_cap * tanh(logit / soft_cap)`."""

    def __call__(self, outputs: Tensor) -> Tensor:
        logits = outputs * self.factor if self.factor != 1 else outputs
        return logits if self.soft_cap is None else (logits / self.soft_cap).tanh() * self.soft_cap


@dataclass(frozen=True, slots=True)
class LinearHead:
    """Head whose outputs are a sum of products; adapters are further products."""

    inputs: tuple[Tensor, ...]
    """Inputs at the positions, [N, I] of each product."""
    weights: tuple[Tensor, ...]
    """Weights, [V, I] of each product."""
    bias_V: Tensor | None
    transform: LogitTransform


def blockwise_logprobs(
    head: LinearHead,
    *,
    token_ids_M: Tensor,
    place_M: Tensor,
    temperature: float,
    entropy_has_gradient: bool = True,
    candidate_ids_MK: Tensor | None = None,
) -> TokenLogProbs:
    """Return what `token_logprobs` returns for the logits of a head, whose arguments beside the logits these are.

    Gradients reach the inputs of the head at the N positions, its weights and its bias.
    """
    ids_P, place_P = token_ids_M, place_M
    if candidate_ids_MK is not None:
        ids_P = torch.cat([ids_P, candidate_ids_MK.flatten()])
        place_P = torch.cat([place_P, place_M.repeat_interleave(candidate_ids_MK.shape[1])])
    model_dtype = head.inputs[0].dtype
    dtype = torch.promote_types(model_dtype, torch.float32)
    inputs = [each.to(dtype) for each in head.inputs]  # their gradients are summed over blocks in this dtype
    lowest = torch.finfo(dtype).min  # finite, so that a probability of 0 adds 0 and not NaN

    def of_block(start: int, bias_C: Tensor | None, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return the pairs of a block, their logits, its log-sum-exp, and the negative entropy of its distribution."""
        outputs_NC = functional.linear(inputs[0].to(model_dtype), weights[0], bias_C)
        for inputs_NI, weight_CI in zip(inputs[1:], weights[1:], strict=True):
            outputs_NC = outputs_NC + inputs_NI.to(model_dtype) @ weight_CI.T
        logits_NC = head.transform(outputs_NC.to(dtype))
        logits_NC = logits_NC if temperature == 1 else logits_NC / temperature
        pairs = ((ids_P >= start) & (ids_P < start + logits_NC.shape[1])).nonzero().flatten()
        logits_P = logits_NC[place_P[pairs], ids_P[pairs] - start]
        logits_NC = logits_NC.clamp(min=lowest)
        log_sum_N = logits_NC.logsumexp(dim=-1)
        logprobs_NC = logits_NC - log_sum_N[:, None]
        logprobs_NC = logprobs_NC if entropy_has_gradient else logprobs_NC.detach()
        return pairs, logits_P, log_sum_N, (logprobs_NC.exp() * logprobs_NC).sum(dim=-1)

    num_elements = BLOCK_ELEMENTS.get(ids_P.device.type, OTHER_BLOCK_ELEMENTS)
    size = max(MIN_BLOCK, num_elements // max(1, len(inputs[0])))
    starts = range(0, len(head.weights[0]), size)
    biases = [None] * len(starts) if head.bias_V is None else _split(head.bias_V, size)
    weights = zip(*(_split(each, size) for each in head.weights), strict=True)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    found: list[tuple[Tensor, ...]] = [
        cast(Any, checkpoint).checkpoint(of_block, start, bias_C, *weights_CI, **options)
        for start, bias_C, weights_CI in zip(starts, biases, weights, strict=True)
    ]
    pairs, logits, log_sums, negative_entropies = zip(*found, strict=True)
    log_sums_ND = torch.stack(log_sums, dim=-1)
    log_sum_N = log_sums_ND.logsumexp(dim=-1)
    log_shares_ND = log_sums_ND - log_sum_N[:, None]
    log_shares_ND = log_shares_ND if entropy_has_gradient else log_shares_ND.detach()
    entropy_N = -(log_shares_ND.exp() * (log_shares_ND + torch.stack(negative_entropies, dim=-1))).sum(dim=-1)
    logprobs_P = torch.cat(logits)[torch.cat(pairs).argsort()] - log_sum_N[place_P]
    sampled_M, candidates = logprobs_P[: len(token_ids_M)], logprobs_P[len(token_ids_M) :]
    return TokenLogProbs(
        sampled_M,
        entropy_N[place_M],
        None if candidate_ids_MK is None else candidates.view(candidate_ids_MK.shape),
    )


def _split(values: Tensor, size: int) -> tuple[Tensor, ...]:
    return cast(Any, values).split(size)
