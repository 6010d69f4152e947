"""Divergences between policy and teacher over the teacher's likeliest tokens. B rows, R tokens, K candidates."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

SMALLEST_REST = 1e-6
"""Least probability of the rest. The rest of a whole distribution is 0, of which rounding would leave about 1e-7."""
Direction: TypeAlias = Literal["forward_kl", "reverse_kl"]


def divergence(
    logprobs_BRK: Tensor, *, teacher_logprobs_BRK: Tensor, is_taught_BR: Tensor, direction: Direction
) -> Tensor:
    """Return the KL divergence between the distributions of policy and teacher at each token, in nats; [B, R].

    Both distributions are over the candidates and one more outcome, the rest, which holds the probability of all other
    tokens. With `P` and `Q` for teacher and policy, `forward_kl` is the sum of `P (log P - log Q)` over these outcomes
    (GKD, arXiv 2306.13649, on the policy's own samples), and `reverse_kl` that of `Q (log Q - log P)` (MiniLLM, arXiv
    2306.08543). By the log-sum inequality (Cover and Thomas, Elements of Information Theory, theorem 2.7.1), merging
    outcomes never raises a divergence; if the candidates are the whole vocabulary, it is the divergence itself.

    A rest below `SMALLEST_REST` counts as `SMALLEST_REST`, and has no gradient.

    Args:
        logprobs_BRK: Log-probs of the policy for the candidates, with a gradient.
        teacher_logprobs_BRK: Log-probs of the teacher; minus infinity for a candidate that does not count.
        is_taught_BR: Bool: tokens that count. The result and its gradient are 0 elsewhere, whatever the log-probs are.
        direction: Which of the two divergences.
    """
    is_candidate_BRK = is_taught_BR[..., None] & ~teacher_logprobs_BRK.isneginf()
    policy_BRK = torch.where(is_candidate_BRK, logprobs_BRK, 0.0)
    teacher_BRK = torch.where(is_candidate_BRK, teacher_logprobs_BRK, 0.0).to(policy_BRK)
    first_BRK, second_BRK = (
        (teacher_BRK, policy_BRK) if direction == "forward_kl" else (policy_BRK, teacher_BRK)
    )
    candidates_BR = (is_candidate_BRK * first_BRK.exp() * (first_BRK - second_BRK)).sum(dim=-1)
    first_BR, second_BR = _log_rest(first_BRK, is_candidate_BRK), _log_rest(second_BRK, is_candidate_BRK)
    rest_BR = first_BR.exp() * (first_BR - second_BR)
    return torch.where(is_taught_BR, candidates_BR + rest_BR, 0.0)


def _log_rest(logprobs_BRK: Tensor, is_candidate_BRK: Tensor) -> Tensor:
    """Return the log of the probability of all tokens that are not candidates, [B, R]."""
    held_BR = (is_candidate_BRK * logprobs_BRK.exp()).sum(dim=-1)
    return (1 - held_BR).clamp(min=SMALLEST_REST).log()
