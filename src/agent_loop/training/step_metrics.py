"""Metrics of the trajectories of a step: rewards, lengths, turns, tools and failures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from agent_loop.runtime.numeric import as_finite_number
from agent_loop.training import metrics as names
from agent_loop.training.advantages.estimate import SOURCE
from agent_loop.trajectory import (
    Feedback,
    IncidentKind,
    Trajectory,
    branch_weights,
    group_branches,
    mean_reward,
    without_lost,
)
from agent_loop.trajectory.branches import seat_of
from agent_loop.types import Origin, Row

MAX_SOURCES = 20
"""Number of data sources with metrics of their own."""


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
    means = _rewards_of(rollouts)
    sampled = [
        (s.weight_version, len(s)) for o in outputs for s in o.segments if s.weight_version is not None
    ]
    num_sampled = sum(length for _, length in sampled)
    lag = sum((weight_version - version) * length for version, length in sampled)
    response_lengths = [len(o.response_ids) for o in outputs]

    def mean(values: Sequence[float]) -> float:
        return float(np.dot(values, weights)) / len(rollouts)

    metrics = {
        names.SUCCESS_SHARE: _success_share(rollouts, threshold=success_threshold),
        names.UNSCORED_SHARE: 1 - len(means) / len(rollouts),
        names.NUM_TURNS_MEAN: mean([o.num_turns for o in outputs]),
        names.PROMPT_LENGTH_MEAN: mean([len(o.prompt_ids) for o in outputs]),
        names.RESPONSE_LENGTH_MEAN: mean(response_lengths),
        names.RESPONSE_LENGTH_MAX: float(max(response_lengths)),
        names.MODEL_TOKENS: float(sum(o.num_model_tokens for o in outputs)),
        names.TOOL_CALLS_MEAN: mean([o.metrics.num_tool_calls for o in outputs]),
        names.STALENESS_MAX: float(
            weight_version - min((version for version, _ in sampled), default=weight_version)
        ),
        names.STALENESS_MEAN: lag / max(num_sampled, 1),
    }

    def incidents(kind: IncidentKind) -> float:
        return mean([sum(each.kind is kind for each in o.incidents) for o in outputs])

    malformed, invalid = incidents(IncidentKind.MALFORMED_CALL), incidents(IncidentKind.INVALID_TURN)
    num_turns = mean([o.num_assistant_turns for o in outputs])
    metrics |= {
        names.MALFORMED_CALL_SHARE: malformed and malformed / (malformed + metrics[names.TOOL_CALLS_MEAN]),
        names.INVALID_TURN_SHARE: invalid and invalid / num_turns,
    }
    if rewards:
        metrics |= {
            names.REWARD_MEAN: float(np.mean(means)),
            names.REWARD_MIN: min(rewards),
            names.REWARD_MAX: max(rewards),
        }
    return metrics | _seat_rewards(trajectories) | _part_means(rollouts) | counts


def data_sources(rows: Sequence[Row]) -> list[str]:
    """Return the data sources of a run's rows that have metrics of their own; empty if there is only one."""
    found = {source: None for row in rows if isinstance(source := row.get(SOURCE), str)}
    return list(found)[:MAX_SOURCES] if len(found) > 1 else []


def source_metrics(
    trajectories: Sequence[Trajectory], *, sources: Sequence[str], success_threshold: float
) -> dict[str, float]:
    """Return the rewards and successes of the rollouts of each data source."""
    of_source: defaultdict[object, list[Trajectory]] = defaultdict(list)
    for trajectory in without_lost(trajectories):
        of_source[trajectory.row.get(SOURCE)].append(trajectory)
    metrics: dict[str, float] = {}
    for source in sources:
        rollouts = group_branches(of_source[source])
        if not rollouts:
            continue
        prefix, means = f"{names.BY_SOURCE}{source}/", _rewards_of(rollouts)
        metrics[f"{prefix}rollouts"] = float(len(rollouts))
        metrics[prefix + names.SUCCESS_SHARE] = _success_share(rollouts, threshold=success_threshold)
        if means:
            metrics[prefix + names.REWARD_MEAN] = float(np.mean(means))
    return metrics


def replay_metrics(trajectories: Sequence[Trajectory], *, weight_version: int) -> dict[str, float]:
    """Return the metrics of replayed trajectories; empty without any."""
    if not trajectories:
        return {}
    sampled = [s for t in trajectories for s in t.output.segments if s.weight_version is not None]
    return {
        names.REPLAYED_GROUPS: float(len({t.group for t in trajectories})),
        names.REPLAYED_TOKENS: float(sum(map(len, sampled))),
        names.REPLAYED_AGE_MAX: float(weight_version - min((s.weight_version or 0) for s in sampled)),
    }


def feedback_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return for each tool its `calls` per rollout, their `failed_share`, and the means of their rewards and numbers.

    The numbers are those in the dict that `execute` returned. Branches share the weight of their rollout. Rollouts that
    infrastructure failed do not count.
    """
    trajectories = without_lost(trajectories)
    weights = branch_weights(trajectories)
    calls: defaultdict[str, list[tuple[Feedback, float]]] = defaultdict(list)
    for trajectory, weight in zip(trajectories, weights, strict=True):
        for feedback in trajectory.output.feedback:
            if feedback.origin is Origin.TOOL and feedback.incident is not IncidentKind.UNKNOWN_TOOL:
                calls[feedback.name].append((feedback, weight))
    metrics: dict[str, float] = {}
    for name, made in sorted(calls.items()):
        prefix, total = f"{names.TOOLS}{name}/", sum(weight for _, weight in made)
        num_failed = sum(weight for feedback, weight in made if feedback.incident is not None)
        metrics |= {f"{prefix}calls": total / sum(weights), f"{prefix}failed_share": num_failed / total}
        numbers: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for call, weight in made:
            for key, number in _numbers({**call.extra, "reward": call.reward}).items():
                numbers[key].append((number, weight))
        for key, found in sorted(numbers.items()):
            values, shares = zip(*found, strict=True)
            metrics[f"{prefix}{key}/mean"] = float(np.dot(values, shares)) / sum(shares)
    return metrics


def _rewards_of(rollouts: Sequence[Sequence[Trajectory]]) -> list[float]:
    return [reward for branches in rollouts if (reward := mean_reward(branches)) is not None]


def _success_share(rollouts: Sequence[Sequence[Trajectory]], *, threshold: float) -> float:
    successes = [
        any(t.reward is not None and t.reward >= threshold for t in branches) for branches in rollouts
    ]
    return sum(successes) / len(rollouts)


def _seat_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean reward of each seat of games."""
    by_seat: defaultdict[Hashable, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_seat[seat_of(trajectory)].append(trajectory)
    means = {seat: _rewards_of(group_branches(played)) for seat, played in by_seat.items()}
    return {
        f"{names.SEAT_REWARD}{seat}/mean": float(np.mean(found))
        for seat, found in means.items()
        if seat is not None and found
    }


def _part_means(rollouts: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Return the mean of each number in `reward_extra`. A rollout's number is the mean of those of its branches."""
    means: defaultdict[str, list[float]] = defaultdict(list)
    for branches in rollouts:
        numbers: defaultdict[str, list[float]] = defaultdict(list)
        for trajectory in branches:
            for name, number in _numbers(trajectory.reward_extra).items():
                numbers[name].append(number)
        for name, found in numbers.items():
            means[name].append(float(np.mean(found)))
    return {f"{names.REWARD_PART}{name}/mean": float(np.mean(found)) for name, found in sorted(means.items())}


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    found = {str(name): as_finite_number(value) for name, value in values.items()}
    return {name: number for name, number in found.items() if number is not None}


def _counts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the shares of stop reasons and incidents, and the numbers of failures and retries, of all rollouts."""
    num_rollouts = len(group_branches(trajectories))
    shares: defaultdict[str, float] = defaultdict(float)
    numbers: defaultdict[str, float] = defaultdict(float)
    for trajectory, weight in zip(trajectories, branch_weights(trajectories), strict=True):
        output = trajectory.output
        shares[f"{names.STOP_REASON}{output.stop_reason.value}"] += weight / num_rollouts
        for incident in output.incidents:
            shares[f"{names.INCIDENT}{incident.kind.value}"] += weight / num_rollouts
            numbers[names.RETRIES] += incident.kind is IncidentKind.RETRIED
        if output.failure is not None:
            numbers[f"{names.FAILURES}{output.failure.kind.value}"] += weight
    return {**shares, **{name: number for name, number in numbers.items() if number}}
