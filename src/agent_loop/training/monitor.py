"""Monitor of a run: refuses to train on nothing, and warns where a known collapse begins."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agent_loop.config import Config
from agent_loop.errors import ConfigError, TrainingError
from agent_loop.loops.partial import AsyncPartialToolAgentLoop
from agent_loop.loops.registry import LoopRegistry
from agent_loop.loops.single_turn import SingleTurnAgentLoop
from agent_loop.loops.tool_agent import ToolAgentLoop
from agent_loop.training import metrics as names
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row, StopReason

UNREWARDING_LOOPS = frozenset({SingleTurnAgentLoop, ToolAgentLoop, AsyncPartialToolAgentLoop})
"""Loops whose rewards come only from tools and interactions."""
GIVE_A_REWARD = (
    "set reward.function, or have a tool's calc_reward, an interaction's calculate_score, an environment's get_reward "
    "or the loop's reward_score give one"
)


def refuse_without_reward(config: Config, rows: Iterable[Row]) -> None:
    """Raise an error if, by its configuration, nothing in a run can score a trajectory."""
    multi_turn, agent = config.rollout.multi_turn, config.rollout.agent
    scores = (
        config.reward.function or config.reward.functions,
        multi_turn.tools,
        multi_turn.tool_config_path,
        multi_turn.interaction_config_path,
        multi_turn.environments,
        agent.loop_files,
        agent.agent_loop_config_path,
    )
    if any(scores) or ":" in config.rollout.default_agent_loop:
        return
    names = {str(row.get("agent_name") or config.rollout.default_agent_loop) for row in rows}
    loops = LoopRegistry()
    if all(loops.get(name, where="agent_name").loop_class in UNREWARDING_LOOPS for name in names):
        raise ConfigError(f"nothing gives a reward, so nothing can be learned; {GIVE_A_REWARD}")


def refuse_truncated_sampling(config: Config) -> None:
    """Raise an error if the samples to train on come from a part of the distribution that their log-probs cover."""
    for name, full in (("top_p", 1.0), ("top_k", -1)):
        found = getattr(config.rollout, name)
        if found != full:
            raise ConfigError(
                f"rollout.{name} is {found}, but log-probs cover the whole vocabulary, so training on samples from a "
                f"part of it is biased; set rollout.{name}={full:g} (rollout.val.{name} may have any value)"
            )


def refuse_without_lesson(trajectories: Sequence[Trajectory], *, step: int) -> None:
    """Raise an error if no trajectory of a step is scored and has a token to train on."""
    reason = why_unlearnable(trajectories)
    if reason is not None:
        raise TrainingError(f"step {step} has nothing to learn from: {reason}")


def why_unlearnable(trajectories: Sequence[Trajectory]) -> str | None:
    """Return why no trajectory is both scored and has a token to train on; None if one is."""
    sampled = [t for t in trajectories if t.output.response_mask.any()]
    if any(t.reward is not None for t in sampled):
        return None
    num, reasons = len(trajectories), Counter(t.output.stop_reason for t in trajectories)
    failures = Counter(t.output.failure.error for t in trajectories if t.output.failure is not None)
    if not trajectories:
        return "the rollout returned no trajectories; check the rows and rollout.over_sample"
    if reasons[StopReason.PROMPT_LENGTH] == num:
        return (
            f"the prompts of all {num} trajectories are over rollout.prompt_length; raise it, set "
            "rollout.truncate_prompt, or shorten the prompts"
        )
    if failures.total() == num:
        [(error, count)] = failures.most_common(1)
        return f"all {num} trajectories failed, {count} of them with {error}; fix that first"
    ended = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    if failures:
        [(error, count)] = failures.most_common(1)
        ended += f"; {count} failed with {error}"
    if not sampled and any(t.output.num_model_tokens for t in trajectories):
        return f"a grammar forced every sampled token of {num} trajectories ({ended}); allow more than one completion"
    if not sampled:
        return (
            f"no token was sampled in any of {num} trajectories ({ended}); check the prompts and the limits"
        )
    counts = f"{len(sampled)} trajectories with sampled tokens, of {num}"
    return f"none of the {counts}, was scored ({ended}); {GIVE_A_REWARD}"


SMALLEST_ADVANTAGE = 1e-6
"""Advantages below this, in mean and standard deviation, are rounding errors."""


class DeadSteps:
    """Counter of consecutive dead steps."""

    def __init__(self, *, limit: int | None, report: Callable[[str], None]) -> None:
        self._limit = limit
        self._report = report
        self._num_consecutive = 0
        self._reason = ""

    def add(self, trajectories: Sequence[Trajectory], metrics: Mapping[str, float], *, step: int) -> int:
        """Count a completed step and return the number of consecutive dead steps up to it.

        The first one of them is reported, with its reason.
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

    @property
    def are_too_many(self) -> bool:
        return self._limit is not None and self._num_consecutive >= self._limit

    def error(self, *, step: int) -> TrainingError:
        """Return the error that ends the run after this step."""
        return TrainingError(
            f"steps {step - self._num_consecutive + 1} to {step} had nothing to learn from; step {step}: "
            f"{self._reason}. The run stopped, because trainer.max_dead_steps is {self._limit}; fix the cause, then "
            "resume the run"
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
    """Checks of the metrics of a run. A warning is reported once, and again only after its check has passed."""

    def __init__(self, *, report: Callable[[str], None]) -> None:
        self._report = report
        self._series = {name: Series() for name in CHECKS}
        self._failing = set[str]()

    def add(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Check the metrics of a completed step, and report new warnings."""
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
