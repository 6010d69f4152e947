"""Scores of teachers as columns of a batch, and the loss or the reward that come of them.

B rows of a batch or of a micro-batch, R response width, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from agent_loop.config import DistillationConfig
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.forward import ResponseLogProbs
from agent_loop.training.losses.terms import kl_penalty, masked_difference
from agent_loop.training.micro_batches import MicroBatch

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

    A rest below `SMALLEST_REST` counts as `SMALLEST_REST`, and has no gradient. A candidate whose log-prob of the
    teacher is minus infinity does not count. At tokens that are not taught, the result and its gradient are 0, whatever
    the log-probs are.
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


TEACHER = "distillation.teacher"
"""int64 [B]: number of the row's teacher in `distillation.teachers`, -1 for a row that no teacher scored."""
LOG_PROBS = "distillation.log_probs"
"""float32 [B, R]: log-probs of the row's tokens by its teacher, 0 in other rows."""
TOP_IDS = "distillation.top_ids"
"""int32 [B, R, K]: ids of the teacher's likeliest tokens; absent if none were asked for."""
TOP_LOG_PROBS = "distillation.top_log_probs"
"""float32 [B, R, K]: their log-probs, minus infinity for a place without a token."""
COLUMNS = (TEACHER, LOG_PROBS, TOP_IDS, TOP_LOG_PROBS)
_SUM, _COUNT = "teacher_sum/", "teacher_count/"


@dataclass(frozen=True, slots=True)
class TeacherTargets:
    """Scores of the sampled tokens of a batch by their teachers."""

    config: DistillationConfig
    teachers_B: Tensor
    is_taught_BR: Tensor
    """Bool: sampled tokens of rows that a teacher scored."""
    logprobs_BR: Tensor
    top_ids_BRK: Tensor | None
    top_logprobs_BRK: Tensor | None

    @classmethod
    def of(cls, batch: RolloutBatch, *, config: DistillationConfig) -> TeacherTargets | None:
        """Return the targets of a batch; None if no teachers were asked about it."""
        columns = cast(Any, batch)
        teachers_B: Tensor | None = columns.get(TEACHER, None)
        if teachers_B is None:
            return None
        return cls(
            config=config,
            teachers_B=teachers_B,
            is_taught_BR=batch["response_mask"].bool() & (teachers_B >= 0)[:, None],
            logprobs_BR=batch[LOG_PROBS],
            top_ids_BRK=columns.get(TOP_IDS, None),
            top_logprobs_BRK=columns.get(TOP_LOG_PROBS, None),
        )

    @property
    def is_taught_B(self) -> Tensor:
        """Bool: rows with a token that a teacher scored."""
        return self.is_taught_BR.any(dim=1)

    @property
    def is_loss(self) -> bool:
        """Whether the objective is a term of the loss, not of the advantages."""
        return self.config.objective != "reward"

    def advantages(self, logprobs_BR: Tensor) -> Tensor:
        """Return the teacher's log-prob less that of the policy that sampled; [B, R], 0 at tokens that are not taught.

        Its mean over samples is minus the reverse KL divergence, token by token (Thinking Machines, "On-Policy
        Distillation", 2025).
        """
        return masked_difference(self.logprobs_BR, logprobs_BR, mask_BT=self.is_taught_BR)

    def candidate_ids(self, micro_batch: MicroBatch) -> Tensor | None:
        """Return the ids whose log-probs the loss needs; None if the sampled tokens are enough."""
        return None if self.top_ids_BRK is None else micro_batch.cut(self.top_ids_BRK).long()

    def losses(self, found: ResponseLogProbs, micro_batch: MicroBatch) -> Tensor:
        """Return the divergence at each token of a micro-batch, [B, R], 0 at tokens that are not taught."""
        is_taught_BR = micro_batch.cut(self.is_taught_BR)
        if self.config.objective not in ("forward_kl", "reverse_kl"):
            return kl_penalty(
                found.sampled_BR,
                reference_logprobs_BT=micro_batch.cut(self.logprobs_BR),
                mask_BT=is_taught_BR,
                estimator="k2",
            )
        return divergence(
            cast(Tensor, found.candidates_BRK),
            teacher_logprobs_BRK=micro_batch.cut(cast(Tensor, self.top_logprobs_BRK)),
            is_taught_BR=is_taught_BR,
            direction=self.config.objective,
        )

    def sums(self, values_BR: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Return for each teacher the sum of the divergences of a micro-batch, and the number of its tokens."""
        is_taught_BR = micro_batch.cut(self.is_taught_BR) & micro_batch.mask_BR.bool()
        teachers_B = self.teachers_B.to(values_BR.device)[micro_batch.rows_B.to(values_BR.device)]
        found: dict[str, Tensor] = {}
        for number, name in enumerate(self.config.teachers):
            is_own_BR = is_taught_BR & (teachers_B == number)[:, None]
            found[f"{_SUM}{name}"], found[f"{_COUNT}{name}"] = values_BR[is_own_BR].sum(), is_own_BR.sum()
        return found

    def pop_means(self, sums: dict[str, float]) -> dict[str, float]:
        """Remove the results of `sums` from sums of metrics, and return the mean divergence from each teacher."""
        found = {
            name: (sums.pop(f"{_SUM}{name}"), sums.pop(f"{_COUNT}{name}")) for name in self.config.teachers
        }
        return {f"{names.TEACHER_KL}{name}": total / count for name, (total, count) in found.items() if count}

    def metrics(self, batch: RolloutBatch, *, old_logprobs_BR: Tensor | None) -> dict[str, float]:
        """Return the share of sampled tokens that are taught, and without a loss the divergence from each teacher.

        `old_logprobs_BR` are the log-probs of the policy that sampled.
        """
        found = {
            names.TAUGHT_SHARE: float(self.is_taught_BR.sum() / batch["response_mask"].sum().clamp(min=1))
        }
        if self.is_loss or old_logprobs_BR is None:
            return found
        divergences_BR = -self.advantages(old_logprobs_BR)
        for number, name in enumerate(self.config.teachers):
            values_N = divergences_BR[self.is_taught_BR & (self.teachers_B == number)[:, None]]
            if len(values_N):
                found[f"{names.TEACHER_KL}{name}"] = float(values_N.mean())
        return found
