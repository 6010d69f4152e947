"""Early warnings: lines on the console where a known collapse of a training run begins."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agent_loop.training import metrics as names
from agent_loop.types import StopReason

FIRST_STEPS = 5
"""Number of steps whose mean a metric is compared with. A resumed run counts them from its own first step."""
WINDOW = 3
"""Number of recent steps whose mean is compared, so that one unusual step gives no warning."""
LOWEST_ENTROPY_SHARE = 0.1
"""Smallest entropy without a warning, as a share of its mean over the first steps."""
LARGEST_LENGTH_RATIO = 2.0
"""Largest response length without a warning, as a multiple of its mean over the first steps."""
LARGEST_CUT_SHARE = 0.5
"""Largest share of rollouts that end at `rollout.response_length` without a warning."""
LOWEST_SIGNAL_SHARE = 0.05
"""`reward/signal_share` below this in `WINDOW` steps in a row gives a warning, unless all of them are dead steps."""
LARGEST_MISMATCH = 0.1
"""Largest mean absolute difference between the log-probs of trainer and rollout without a warning, in nats."""
CUT_SHARE = f"{names.STOP_REASON}{StopReason.RESPONSE_LENGTH}"
"""Share of rollouts that end at `rollout.response_length`; absent if none does."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values of a metric in the first steps and in the recent ones."""

    first: list[float] = field(default_factory=list[float])
    recent: deque[float] = field(default_factory=lambda: deque[float](maxlen=WINDOW))

    def add(self, value: float) -> None:
        """Add the value of a step."""
        if len(self.first) < FIRST_STEPS:
            self.first.append(value)
        self.recent.append(value)

    @property
    def start(self) -> float | None:
        """Mean over the first steps; None before there are `FIRST_STEPS`."""
        return sum(self.first) / FIRST_STEPS if len(self.first) == FIRST_STEPS else None

    @property
    def now(self) -> float:
        """Mean over the recent steps."""
        return sum(self.recent) / len(self.recent)


class EarlyWarnings:
    """Checks of the metrics of a run. A warning is reported once, and again only after its check has passed.

    Args:
        report: Function that shows a line to the user.
    """

    def __init__(self, *, report: Callable[[str], None]) -> None:
        self._report = report
        self._series = {name: Series() for name in CHECKS}
        self._failing = set[str]()

    def add(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Check the metrics of a completed step, and report new warnings.

        Args:
            metrics: Metrics of the rollout and of the update. A metric that is absent or not finite is not checked.
            step: Number of the step.
        """
        for name, check in CHECKS.items():
            value = metrics.get(name, 0.0 if name == CUT_SHARE else math.nan)
            if not math.isfinite(value):
                continue
            self._series[name].add(value)
            warning = check(self._series[name])
            if warning is None:
                self._failing.discard(name)
            elif name not in self._failing:
                self._failing.add(name)
                self._report(f"step {step}: {warning}")


def _check_entropy(entropy: Series) -> str | None:
    if entropy.start is None or entropy.now >= LOWEST_ENTROPY_SHARE * entropy.start:
        return None
    return (
        f"the entropy fell from {entropy.start:.2g} nats in the first {FIRST_STEPS} steps to {entropy.now:.2g}: the "
        "policy hardly explores, so the rewards of a group soon become equal; raise actor.entropy_coeff or "
        "actor.clip_ratio_high, or lower actor.lr"
    )


def _check_length(length: Series) -> str | None:
    if length.start is None or length.now <= LARGEST_LENGTH_RATIO * length.start:
        return None
    return (
        f"responses grew from {length.start:.0f} tokens in the first {FIRST_STEPS} steps to {length.now:.0f}: the "
        "policy may repeat itself, or the reward may favour length; read some trajectories with agent-loop show, or "
        "set algorithm.overlong_buffer"
    )


def _check_cut_share(share: Series) -> str | None:
    if share.now <= LARGEST_CUT_SHARE:
        return None
    return (
        f"{share.now:.0%} of the rollouts end at rollout.response_length: their answers are cut, so their rewards say "
        "little; raise rollout.response_length, or set algorithm.overlong_buffer"
    )


def _check_signal(share: Series) -> str | None:
    if len(share.recent) < WINDOW or not 0 < max(share.recent) < LOWEST_SIGNAL_SHARE:
        return None
    return (
        f"only {share.now:.1%} of the rollouts of the last {WINDOW} steps had a signal: nearly all groups have equal "
        "rewards, because their rows are too easy or too hard; use other rows, raise rollout.n, or set "
        "algorithm.max_refills"
    )


def _check_mismatch(difference: Series) -> str | None:
    if difference.now <= LARGEST_MISMATCH:
        return None
    return (
        f"the log-probs of trainer and rollout differ by {difference.now:.2g} nats in the mean: the trainer computes "
        "other probabilities than the servers that sampled, or older weights sampled; use one model.dtype for both, "
        "lower trainer.max_staleness, or set actor.correction.kind"
    )


def _check_skipped(model: str, *, section: str) -> Callable[[Series], str | None]:
    def check(skipped: Series) -> str | None:
        if not skipped.now:
            return None
        return (
            f"{skipped.recent[-1]:.0f} optimiser steps of the {model} were skipped, because their gradients were not "
            f"finite: the training diverges, or numbers overflow; lower {section}.lr, or use a wider model.dtype"
        )

    return check


CHECKS: Mapping[str, Callable[[Series], str | None]] = {
    names.ENTROPY: _check_entropy,
    names.RESPONSE_LENGTH_MEAN: _check_length,
    CUT_SHARE: _check_cut_share,
    names.SIGNAL_SHARE: _check_signal,
    names.LOGPROB_DIFF_MEAN: _check_mismatch,
    names.NONFINITE_UPDATES: _check_skipped("policy", section="actor"),
    names.CRITIC_NONFINITE_UPDATES: _check_skipped("critic", section="critic"),
}
"""Check of each metric: a function that returns what is seen, what it usually means, and what to try."""
