"""Refusals to train on nothing, and a monitor that warns of dead steps and of known collapses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

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


def why_unlearnable(trajectories: Sequence[Trajectory]) -> str | None:
    """Return why no trajectory is both scored and has a token to train on; None if one is."""
    sampled = [t for t in trajectories if t.output.response_mask.any()]
    if any(t.reward is not None for t in sampled):
        return None
    num, ended = len(trajectories), _stop_reasons(trajectories)
    failures = Counter(t.output.failure.error for t in trajectories if t.output.failure is not None)
    if not trajectories:
        return "the rollout returned no trajectories; check the rows and rollout.over_sample"
    if all(t.output.stop_reason is StopReason.PROMPT_LENGTH for t in trajectories):
        return (
            f"the prompts of all {num} trajectories are over rollout.prompt_length; raise it, set "
            "rollout.truncate_prompt, or shorten the prompts"
        )
    for error, count in failures.most_common(1):
        if failures.total() == num:
            return f"all {num} trajectories failed, {count} of them with {error}; fix that first"
        ended += f"; {count} failed with {error}"
    if sampled:
        counts = f"{len(sampled)} trajectories with sampled tokens, of {num}"
        return f"none of the {counts}, was scored ({ended}); {GIVE_A_REWARD}"
    if any(t.output.num_model_tokens for t in trajectories):
        return f"a grammar forced every sampled token of {num} trajectories ({ended}); allow more than one completion"
    return f"no token was sampled in any of {num} trajectories ({ended}); check the prompts and the limits"


SMALLEST_ADVANTAGE = 1e-6
"""Advantages below this, in mean and standard deviation, are rounding errors."""


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
    remedy = (
        "use rows that the model solves sometimes, raise rollout.n, or start from a model that solves some"
    )
    if min(rewards) < max(rewards):
        num_groups = len({t.group for t in trajectories})
        return (
            f"in each of the {num_groups} groups, all rewards are equal or only one trajectory is scored, so none is "
            f"better than another of its group; {remedy}"
        )
    if metrics.get(names.SUCCESS_SHARE) == 1:
        remedy = "the rows may be solved: use harder rows, or end the run here"
    return f"all {len(rewards)} rewards are {rewards[0]:g}, so no trajectory is better than another; {remedy}"


def _is_zero(metrics: Mapping[str, float], *keys: str) -> bool:
    return all(abs(metrics.get(key, 1.0)) < SMALLEST_ADVANTAGE for key in keys)


def _stop_reasons(trajectories: Sequence[Trajectory]) -> str:
    counts = Counter(t.output.stop_reason for t in trajectories)
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


FIRST_STEPS = 5
"""Number of steps whose mean a metric is compared with. A resumed run counts them from its own first step."""
WINDOW = 3
"""Number of recent steps whose mean is compared, so that one unusual step gives no warning."""
CUT_SHARE = f"{names.STOP_REASON}{StopReason.RESPONSE_LENGTH}"
"""Share of rollouts that end at `rollout.response_length`; absent if none does."""


@dataclass(frozen=True, slots=True)
class Check:
    """Check of a metric in every step."""

    metric: str
    fails: Callable[[Sequence[float], float, float], bool]
    """Called with the last values, their mean, and the mean of the first steps, NaN before there are `FIRST_STEPS`."""
    warning: str
    """Text of the warning: the values `now`, `start` and `last`, their usual cause, and the remedy."""


CHECKS = (
    Check(
        names.ENTROPY,
        lambda _, now, start: now < 0.1 * start,
        "the entropy fell from {start:.2g} nats in the first 5 steps to {now:.2g}: the policy hardly explores, so the "
        "rewards of a group soon become equal; raise actor.entropy_coeff or actor.clip_ratio_high, or lower actor.lr",
    ),
    Check(
        names.RESPONSE_LENGTH_MEAN,
        lambda _, now, start: now > 2 * start,
        "responses grew from {start:.0f} tokens in the first 5 steps to {now:.0f}: the policy may repeat itself, or "
        "the reward may favour length; read some trajectories with agent-loop show, or set algorithm.overlong_buffer",
    ),
    Check(
        CUT_SHARE,
        lambda _, now, __: now > 0.5,
        "{now:.0%} of the rollouts end at rollout.response_length: their answers are cut, so their rewards say little; "
        "raise rollout.response_length, or set algorithm.overlong_buffer",
    ),
    Check(
        names.SIGNAL_SHARE,
        lambda recent, _, __: len(recent) == WINDOW and 0 < max(recent) < 0.05,  # without any, steps are dead
        "only {now:.1%} of the rollouts of the last 3 steps had a signal: nearly all groups have equal rewards, "
        "because their rows are too easy or too hard; use other rows, raise rollout.n, or set algorithm.max_refills",
    ),
    Check(
        names.LOGPROB_DIFF_MEAN,
        lambda _, now, __: now > 0.1,
        "the log-probs of trainer and rollout differ by {now:.2g} nats in the mean: the trainer computes other "
        "probabilities than the servers that sampled, or older weights sampled; use one model.dtype for both, lower "
        "trainer.max_staleness, or set actor.correction.kind",
    ),
    *(
        Check(
            metric,
            lambda _, now, __: now > 0,
            f"{{last:.0f}} optimiser steps of the {model} were skipped, because their gradients were not finite: the "
            f"training diverges, or numbers overflow; lower {section}.lr, or use a wider model.dtype",
        )
        for metric, model, section in (
            (names.NONFINITE_UPDATES, "policy", "actor"),
            (names.CRITIC_NONFINITE_UPDATES, "critic", "critic"),
        )
    ),
)


class Monitor:
    """Observer of completed steps. Reports dead steps and the beginnings of known collapses.

    A warning is reported once, and again only after its check has passed.
    """

    def __init__(self, *, max_dead_steps: int | None, report: Callable[[str], None]) -> None:
        self._max_dead_steps = max_dead_steps
        self._report = report
        self._num_dead = 0
        self._reason = ""
        self._values = {check.metric: list[float]() for check in CHECKS}
        self._failing = set[str]()

    def add(self, trajectories: Sequence[Trajectory], metrics: Mapping[str, float], *, step: int) -> int:
        """Check a completed step. Return the number of consecutive dead steps up to it."""
        reason = why_dead(trajectories, metrics)
        self._num_dead = 0 if reason is None else self._num_dead + 1
        self._reason = reason or ""
        if self._num_dead == 1:
            limit = self._max_dead_steps
            until = f"; the run stops after {limit} such steps in a row" if limit else ""
            self._report(f"step {step} has nothing to learn from: {reason}{until}")
        self.check(metrics, step=step)
        return self._num_dead

    def check(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Report new warnings on the metrics of a step."""
        for check in CHECKS:
            value = metrics.get(check.metric, 0.0 if check.metric == CUT_SHARE else math.nan)
            if not math.isfinite(value):
                continue
            values = self._values[check.metric]
            values.append(value)
            recent, first = values[-WINDOW:], values[:FIRST_STEPS]
            now, start = fmean(recent), fmean(first) if len(first) == FIRST_STEPS else math.nan
            if not check.fails(recent, now, start):
                self._failing.discard(check.metric)
            elif check.metric not in self._failing:
                self._failing.add(check.metric)
                self._report(f"step {step}: {check.warning.format(now=now, start=start, last=value)}")

    def error(self, *, step: int) -> TrainingError | None:
        """Return the error that ends the run after this step; None if there are not too many dead steps."""
        if self._max_dead_steps is None or self._num_dead < self._max_dead_steps:
            return None
        return TrainingError(
            f"steps {step - self._num_dead + 1} to {step} had nothing to learn from; step {step}: {self._reason}. The "
            f"run stopped, because trainer.max_dead_steps is {self._max_dead_steps}; fix the cause, then resume the run"
        )
