"""Scores of teachers as columns of a batch, and the loss and the reward that come of them.

B rows of a batch or of a micro-batch, R response width, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from agent_loop.config import DistillationConfig
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.distillation.loss import divergence
from agent_loop.training.learned import TOKEN_VALUES
from agent_loop.training.losses import kl_penalty, masked_difference
from agent_loop.training.micro_batches import MicroBatch
from agent_loop.training.policy import ResponseLogProbs

TEACHER = "distillation.teacher"
"""int64 [B]: number of the row's teacher in `distillation.teachers`, -1 for a row that no teacher scored."""
LOG_PROBS = "distillation.log_probs"
"""float32 [B, R]: log-probs of the row's tokens by its teacher, 0 in other rows."""
TOP_IDS = "distillation.top_ids"
"""int32 [B, R, K]: ids of the teacher's likeliest tokens; absent if none were asked for."""
TOP_LOG_PROBS = "distillation.top_log_probs"
"""float32 [B, R, K]: their log-probs, minus infinity for a place without a token."""
COLUMNS = (TEACHER, LOG_PROBS, TOP_IDS, TOP_LOG_PROBS)


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
        """Return the divergence at each token of a micro-batch, [B, R], 0 at tokens that are not taught.

        Args:
            found: Log-probs of the policy, with those of the candidates.
            micro_batch: Rows of the batch.
        """
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

    def metrics(self, batch: RolloutBatch, *, old_logprobs_BR: Tensor | None) -> dict[str, float]:
        """Return the mean divergence from each teacher, and the share of sampled tokens that are taught.

        Args:
            batch: The batch after its update.
            old_logprobs_BR: Log-probs of the policy that sampled; needed if the objective is no loss.
        """
        found = {
            names.TAUGHT_SHARE: float(self.is_taught_BR.sum() / batch["response_mask"].sum().clamp(min=1))
        }
        divergences_BR: Tensor | None = cast(Any, batch).get(TOKEN_VALUES + names.DISTILLATION_LOSS, None)
        if not self.is_loss and old_logprobs_BR is not None:
            divergences_BR = -self.advantages(old_logprobs_BR)
        if divergences_BR is None:
            return found
        is_known_BR = self.is_taught_BR & ~divergences_BR.isnan()  # NaN in rows that were not trained
        for number, name in enumerate(self.config.teachers):
            values = divergences_BR[is_known_BR & (self.teachers_B == number)[:, None]]
            if len(values):
                found[f"{names.TEACHER_KL}{name}"] = float(values.mean())
        return found
