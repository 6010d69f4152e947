"""Dead steps: steps whose rollout gives the update no usable signal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from agent_loop.errors import TrainingError
from agent_loop.training import metrics as names
from agent_loop.training.learnable import why_unlearnable
from agent_loop.trajectory import Trajectory

SMALLEST_ADVANTAGE = 1e-6
"""Advantages below this, in mean and standard deviation, are rounding errors."""


class DeadSteps:
    """Counter of consecutive dead steps.

    Args:
        limit: Number of consecutive dead steps after which a run stops; None never stops it.
        report: Function that shows a line to the user.
    """

    def __init__(self, *, limit: int | None, report: Callable[[str], None]) -> None:
        self._limit = limit
        self._report = report
        self._num_consecutive = 0
        self._reason = ""

    def add(self, trajectories: Sequence[Trajectory], metrics: Mapping[str, float], *, step: int) -> int:
        """Count a completed step and return the number of consecutive dead steps up to it.

        The first one of them is reported, with its reason.

        Args:
            trajectories: The rollout of the step.
            metrics: Metrics of its rollout and of its update.
            step: Number of the step.
        """
        reason = why_dead(trajectories, metrics)
        if reason is None:
            self._num_consecutive = 0
            return 0
        self._num_consecutive += 1
        self._reason = reason
        if self._num_consecutive == 1:
            until = f"; the run stops after {self._limit} such steps in a row" if self._limit else ""
            self._report(f"step {step} has nothing to learn from: {reason}{until}")
        return self._num_consecutive

    def check(self, *, step: int) -> None:
        """Raise an error if too many consecutive steps were dead.

        Raises:
            TrainingError: `limit` steps in a row were; the message explains the last one.
        """
        if self._limit is not None and self._num_consecutive >= self._limit:
            first = step - self._num_consecutive + 1
            raise TrainingError(
                f"steps {first} to {step} had nothing to learn from; step {step}: {self._reason}. The run stopped, "
                f"because trainer.max_dead_steps is {self._limit}; fix the cause, then resume the run"
            )


def why_dead(trajectories: Sequence[Trajectory], metrics: Mapping[str, float]) -> str | None:
    """Return why a step gave its update no usable signal; None if it gave one."""
    if any(metrics.get(name) for name in (names.SFT_TOKENS, names.OBSERVATION_LOSS, names.TAUGHT_SHARE)):
        return None  # its conversations, observations or teachers had one
    unlearnable = why_unlearnable(trajectories)
    if unlearnable is not None:
        return unlearnable
    if metrics[names.SIGNAL_SHARE] == 0 or _is_zero(metrics, names.ADVANTAGE_MEAN, names.ADVANTAGE_STD):
        return _why_equal(trajectories, metrics)
    if metrics.get(names.ROWS_TRAINED) == 0:
        return (
            f"no trajectory with a signal may be trained ({_stop_reasons(trajectories)}); change "
            "algorithm.untrained_stop_reasons, or raise the limits that end them"
        )
    if metrics.get(names.MASKED_SHARE) == 1:
        return (
            "actor.correction masks every token, because the trainer's probabilities are far from the server's; see "
            "actor/rollout_train_logprob_diff_mean, or widen actor.correction.min_ratio and max_ratio"
        )
    if metrics.get(names.NONFINITE_UPDATES) and not metrics.get(names.OPTIMIZER_STEPS):
        return "no gradient was finite; lower actor.lr, or compute in a wider model.dtype"
    return None


def _why_equal(trajectories: Sequence[Trajectory], metrics: Mapping[str, float]) -> str:
    rewards = [t.reward for t in trajectories if t.reward is not None]
    if min(rewards) == max(rewards) and metrics.get(names.SUCCESS_SHARE) == 1:
        remedy = "the rows may be solved: use harder rows, or end the run here"
    else:
        remedy = "use rows that the model solves sometimes, raise rollout.n, or start from a model that solves some"
    if min(rewards) == max(rewards):
        return f"all {len(rewards)} rewards are {rewards[0]:g}, so no trajectory is better than another; {remedy}"
    num_groups = len({t.group for t in trajectories})
    return (
        f"in each of the {num_groups} groups, all rewards are equal or only one trajectory is scored, so none is "
        f"better than another of its group; {remedy}"
    )


def _is_zero(metrics: Mapping[str, float], *keys: str) -> bool:
    return all(abs(metrics.get(key, 1.0)) < SMALLEST_ADVANTAGE for key in keys)


def _stop_reasons(trajectories: Sequence[Trajectory]) -> str:
    counts = Counter(t.output.stop_reason for t in trajectories)
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
