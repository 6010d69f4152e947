"""Log-probs and entropy of tokens: from logits, or from the inputs of a linear head in blocks of the vocabulary.

With blocks, no tensor holds the logits of all positions. The forward pass merges the sums of one block after the other,
as in online softmax (arXiv 1805.02867), and the backward pass computes the logits of each block again. The gradient of
each weight is one product over all positions, as without blocks.

N positions, M tokens, K candidates, P pairs of a position and a token, V tokens of the vocabulary, C tokens of a block,
I inputs of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


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
ValueT = TypeVar("ValueT")


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
    blocks = _Blocks.of(head, ids_P=ids_P, place_P=place_P, temperature=temperature)
    logprobs_P, entropy_N = cast(Any, _BlockwiseLogProbs).apply(
        blocks, entropy_has_gradient, head.bias_V, *head.inputs, *head.weights
    )
    sampled_M, candidates = logprobs_P.split([len(token_ids_M), len(ids_P) - len(token_ids_M)])
    return TokenLogProbs(
        sampled_M,
        entropy_N[place_M],
        None if candidate_ids_MK is None else candidates.view(candidate_ids_MK.shape),
    )


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of the vocabulary, and pairs of a position and a token."""

    size: int
    """Tokens of a block; the last one may have fewer."""
    ids_P: Tensor
    place_P: Tensor
    transform: LogitTransform
    temperature: float
    dtype: torch.dtype
    """Dtype of the log-probs."""

    @classmethod
    def of(cls, head: LinearHead, *, ids_P: Tensor, place_P: Tensor, temperature: float) -> _Blocks:
        num_elements = BLOCK_ELEMENTS.get(ids_P.device.type, OTHER_BLOCK_ELEMENTS)
        size = max(MIN_BLOCK, num_elements // max(1, len(head.inputs[0])))
        dtype = torch.promote_types(head.inputs[0].dtype, torch.float32)
        return cls(size, ids_P, place_P, head.transform, temperature, dtype)

    def logits(
        self,
        bias_V: Tensor | None,
        inputs: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
    ) -> Iterator[tuple[slice, Tensor, Tensor, tuple[Tensor, Tensor]]]:
        """Yield the tokens of each block, its logits [N, C] in a new tensor, its pairs, and their rows and columns."""
        for start in range(0, len(weights[0]), self.size):
            tokens = slice(start, min(start + self.size, len(weights[0])))
            outputs_NC = functional.linear(
                inputs[0], weights[0][tokens], None if bias_V is None else bias_V[tokens]
            )
            for inputs_NI, weight_VI in zip(inputs[1:], weights[1:], strict=True):
                outputs_NC += inputs_NI @ weight_VI[tokens].T
            logits_NC = self.transform(outputs_NC.to(self.dtype))
            if self.temperature != 1:
                logits_NC = logits_NC / self.temperature
            pairs = ((self.ids_P >= tokens.start) & (self.ids_P < tokens.stop)).nonzero().flatten()
            yield tokens, logits_NC, pairs, (self.place_P[pairs], self.ids_P[pairs] - start)

    def slope(self, logits_NC: Tensor) -> Tensor | float:
        """Return the derivative of these logits by the outputs of the head."""
        transform = self.transform
        if transform.soft_cap is None:
            return transform.factor / self.temperature
        share_NC = logits_NC * (self.temperature / transform.soft_cap)
        return (1 - share_NC.square_()).mul_(transform.factor / self.temperature)


class _BlockwiseLogProbs(torch.autograd.Function):
    """Log-probs of pairs, [P], and entropies, [N], from a bias, inputs, and as many weights."""

    @staticmethod
    def forward(
        ctx: Any, blocks: _Blocks, entropy_has_gradient: bool, bias_V: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs, weights = _halves(tensors)
        lowest = torch.finfo(blocks.dtype).min  # finite, so that a probability of 0 adds 0 and not NaN
        top_N = inputs[0].new_full(inputs[0].shape[:1], lowest, dtype=blocks.dtype)
        sum_N, weighted_N = torch.zeros_like(top_N), torch.zeros_like(top_N)
        logits_P = top_N.new_empty(blocks.ids_P.shape)
        for _, logits_NC, pairs, places in blocks.logits(bias_V, inputs, weights):
            logits_P[pairs] = logits_NC[places]
            last_top_N, top_N = top_N, torch.maximum(top_N, logits_NC.amax(dim=-1))
            fall_N = (last_top_N - top_N).clamp_(min=lowest)
            shifted_NC = logits_NC.sub_(top_N[:, None]).clamp_(min=lowest)
            exp_NC = shifted_NC.exp()
            weighted_N = (weighted_N + sum_N * fall_N) * fall_N.exp()
            sum_N = sum_N * fall_N.exp() + exp_NC.sum(dim=-1)
            weighted_N += exp_NC.mul_(shifted_NC).sum(dim=-1)
        log_sum_N = sum_N.log()
        normalizer_N, entropy_N = top_N + log_sum_N, log_sum_N - weighted_N / sum_N
        logprobs_P = logits_P - normalizer_N[blocks.place_P]
        ctx.blocks = blocks
        ctx.set_materialize_grads(False)
        if not entropy_has_gradient:
            ctx.mark_non_differentiable(entropy_N)
        ctx.save_for_backward(normalizer_N, entropy_N, bias_V, *tensors)
        return logprobs_P, entropy_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides a parameter's name)
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor | None, ...]:
        grad_P, grad_entropy_N = cast(tuple[Tensor | None, Tensor | None], grad_outputs)
        normalizer_N, entropy_N, bias_V, *tensors = ctx.saved_tensors
        blocks: _Blocks = ctx.blocks
        inputs, weights = _halves(tensors)
        _, _, needs_bias, *needs = ctx.needs_input_grad
        needs_input, needs_weight = _halves(needs)
        grad_bias_V = torch.empty_like(bias_V) if needs_bias else None
        grad_inputs = [
            _zeros(each, blocks.dtype) if is_needed else None
            for each, is_needed in zip(inputs, needs_input, strict=True)
        ]
        grad_weights = [
            _zeros(each, each.dtype) if is_needed else None
            for each, is_needed in zip(weights, needs_weight, strict=True)
        ]
        if grad_P is None:
            grad_P = normalizer_N.new_zeros(blocks.ids_P.shape)
        total_N = torch.zeros_like(normalizer_N).index_add_(0, blocks.place_P, grad_P)
        for tokens, logits_NC, pairs, places in blocks.logits(bias_V, inputs, weights):
            slope = blocks.slope(logits_NC)
            logprobs_NC = logits_NC.sub_(normalizer_N[:, None])
            grad_NC = logprobs_NC.exp()
            if grad_entropy_N is None:
                grad_NC.mul_(-total_N[:, None])
            else:
                logprobs_NC.clamp_(min=torch.finfo(blocks.dtype).min).add_(entropy_N[:, None])
                grad_NC.mul_(logprobs_NC.mul_(-grad_entropy_N[:, None]).sub_(total_N[:, None]))
            grad_NC.index_put_(places, grad_P[pairs], accumulate=True)
            grad_NC = grad_NC.mul_(slope).to(inputs[0].dtype)
            if grad_bias_V is not None:
                grad_bias_V[tokens] = grad_NC.sum(dim=0)
            for number, (grad_NI, grad_VI) in enumerate(zip(grad_inputs, grad_weights, strict=True)):
                if grad_NI is not None:
                    grad_NI += grad_NC @ weights[number][tokens]
                if grad_VI is not None:
                    torch.mm(grad_NC.T, inputs[number], out=grad_VI[tokens])
        return (None, None, grad_bias_V, *grad_inputs, *grad_weights)


def _halves(values: Sequence[ValueT]) -> tuple[tuple[ValueT, ...], tuple[ValueT, ...]]:
    half = len(values) // 2
    return tuple(values[:half]), tuple(values[half:])


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(like, dtype=dtype)
