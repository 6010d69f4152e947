"""Metrics of a rollout: rewards, lengths, turns, failures and the drift of the chat template."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from agent_loop.chat.template import ChatTemplate
from agent_loop.runtime.numeric import as_finite_number
from agent_loop.training.drift import find_drift
from agent_loop.training.metrics import (
    FAILURES,
    INCIDENT,
    INVALID_TURN_SHARE,
    MALFORMED_CALL_SHARE,
    MODEL_TOKENS,
    NUM_TURNS_MEAN,
    PROMPT_LENGTH_MEAN,
    REPLAYED_AGE_MAX,
    REPLAYED_GROUPS,
    REPLAYED_TOKENS,
    RESPONSE_LENGTH_MAX,
    RESPONSE_LENGTH_MEAN,
    RETRIES,
    REWARD_MAX,
    REWARD_MEAN,
    REWARD_MIN,
    REWARD_PART,
    SEAT_REWARD,
    STALENESS_MAX,
    STALENESS_MEAN,
    STOP_REASON,
    SUCCESS_SHARE,
    TEMPLATE_DRIFT,
    TEMPLATE_EXACT_SHARE,
    TOOL_CALLS_MEAN,
    UNSCORED_SHARE,
)
from agent_loop.trajectory import (
    AgentLoopOutput,
    IncidentKind,
    Trajectory,
    branch_weights,
    group_branches,
    mean_reward,
    without_lost,
)
from agent_loop.trajectory.branches import seat_of

MAX_DRIFT_SAMPLE = 16
"""Number of compared trajectories. A comparison costs a render and an encoding of the whole conversation."""


def rollout_metrics(
    trajectories: Sequence[Trajectory], *, success_threshold: float, weight_version: int
) -> dict[str, float]:
    """Return the metrics of a batch of trajectories; empty for an empty batch.

    Means and shares are over rollouts, whose branches share their weight. A rollout's reward is the mean of its
    branches' rewards; it is a success if any branch is. Rollouts that infrastructure failed are in no mean and no share
    except those of the stop reasons and incidents.
    """
    if not trajectories:
        return {}
    counts = _counts(trajectories)
    trajectories = without_lost(trajectories)
    if not trajectories:
        return counts
    outputs = [t.output for t in trajectories]
    weights, rollouts = branch_weights(trajectories), group_branches(trajectories)
    rewards = [t.reward for t in trajectories if t.reward is not None]
    means = [reward for branches in rollouts if (reward := mean_reward(branches)) is not None]
    successes = [
        any(t.reward is not None and t.reward >= success_threshold for t in branches) for branches in rollouts
    ]
    sampled = [
        (s.weight_version, len(s)) for o in outputs for s in o.segments if s.weight_version is not None
    ]
    num_sampled = sum(length for _, length in sampled)
    lag = sum((weight_version - version) * length for version, length in sampled)
    response_lengths = [len(o.response_ids) for o in outputs]

    def mean(values: Sequence[float]) -> float:
        return float(np.dot(values, weights)) / len(rollouts)

    metrics = {
        SUCCESS_SHARE: sum(successes) / len(rollouts),
        UNSCORED_SHARE: 1 - len(means) / len(rollouts),
        NUM_TURNS_MEAN: mean([o.num_turns for o in outputs]),
        PROMPT_LENGTH_MEAN: mean([len(o.prompt_ids) for o in outputs]),
        RESPONSE_LENGTH_MEAN: mean(response_lengths),
        RESPONSE_LENGTH_MAX: float(max(response_lengths)),
        MODEL_TOKENS: float(sum(o.num_model_tokens for o in outputs)),
        TOOL_CALLS_MEAN: mean([o.metrics.num_tool_calls for o in outputs]),
        STALENESS_MAX: float(
            weight_version - min((version for version, _ in sampled), default=weight_version)
        ),
        STALENESS_MEAN: lag / max(num_sampled, 1),
    }
    metrics |= _call_metrics(outputs, weights=weights)
    if rewards:
        metrics |= {REWARD_MEAN: float(np.mean(means)), REWARD_MIN: min(rewards), REWARD_MAX: max(rewards)}
    return metrics | _seat_rewards(trajectories) | _part_means(rollouts) | counts


def replay_metrics(trajectories: Sequence[Trajectory], *, weight_version: int) -> dict[str, float]:
    """Return the metrics of replayed trajectories; empty without any."""
    if not trajectories:
        return {}
    sampled = [s for t in trajectories for s in t.output.segments if s.weight_version is not None]
    return {
        REPLAYED_GROUPS: float(len({t.group for t in trajectories})),
        REPLAYED_TOKENS: float(sum(map(len, sampled))),
        REPLAYED_AGE_MAX: float(weight_version - min((s.weight_version or 0) for s in sampled)),
    }


def _seat_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean reward of each seat of games."""
    by_seat: defaultdict[Hashable, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_seat[seat_of(trajectory)].append(trajectory)
    metrics: dict[str, float] = {}
    for seat, played in by_seat.items():
        means = [
            reward for branches in group_branches(played) if (reward := mean_reward(branches)) is not None
        ]
        if seat is not None and means:
            metrics[f"{SEAT_REWARD}{seat}/mean"] = float(np.mean(means))
    return metrics


def _part_means(rollouts: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Return the mean of each number in `reward_extra`. A rollout's number is the mean of those of its branches."""
    means: defaultdict[str, list[float]] = defaultdict(list)
    for branches in rollouts:
        numbers: defaultdict[str, list[float]] = defaultdict(list)
        for trajectory in branches:
            for name, value in trajectory.reward_extra.items():
                number = as_finite_number(value)
                if number is not None:
                    numbers[name].append(number)
        for name, found in numbers.items():
            means[name].append(float(np.mean(found)))
    return {f"{REWARD_PART}{name}/mean": float(np.mean(found)) for name, found in sorted(means.items())}


def _counts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the shares of stop reasons and incidents, and the numbers of failures and retries, of all rollouts."""
    num_rollouts = len(group_branches(trajectories))
    shares: defaultdict[str, float] = defaultdict(float)
    numbers: defaultdict[str, float] = defaultdict(float)
    for trajectory, weight in zip(trajectories, branch_weights(trajectories), strict=True):
        output = trajectory.output
        shares[f"{STOP_REASON}{output.stop_reason.value}"] += weight / num_rollouts
        for incident in output.incidents:
            shares[f"{INCIDENT}{incident.kind.value}"] += weight / num_rollouts
            numbers[RETRIES] += incident.kind is IncidentKind.RETRIED
        if output.failure is not None:
            numbers[f"{FAILURES}{output.failure.kind.value}"] += weight
    return {**shares, **{name: number for name, number in numbers.items() if number}}


def _call_metrics(outputs: Sequence[AgentLoopOutput], *, weights: Sequence[float]) -> dict[str, float]:
    kinds: defaultdict[IncidentKind, float] = defaultdict(float)
    num_calls = num_turns = 0.0
    for output, weight in zip(outputs, weights, strict=True):
        for incident in output.incidents:
            kinds[incident.kind] += weight
        num_calls += weight * output.metrics.num_tool_calls
        num_turns += weight * output.num_assistant_turns
    malformed = kinds[IncidentKind.MALFORMED_CALL]
    return {
        MALFORMED_CALL_SHARE: _share(malformed, of=malformed + num_calls),
        INVALID_TURN_SHARE: _share(kinds[IncidentKind.INVALID_TURN], of=num_turns),
    }


def _share(part: float, *, of: float) -> float:
    return part / of if of else 0.0


def drift_metrics(trajectories: Sequence[Trajectory], *, template: ChatTemplate) -> dict[str, float]:
    """Return the share of a sample of trajectories that a full render reproduces; empty if none can be compared."""
    comparable = [
        t.output
        for t in trajectories
        if t.rollout == 0 and t.output.messages and not any(s.attachments for s in t.output.segments)
    ]
    causes = [find_drift(output, template=template) for output in comparable[:MAX_DRIFT_SAMPLE]]
    if not causes:
        return {}
    counts = Counter(causes)
    shares = {f"{TEMPLATE_DRIFT}{cause}": n / len(causes) for cause, n in counts.items() if cause is not None}
    return {TEMPLATE_EXACT_SHARE: counts[None] / len(causes), **shares}
