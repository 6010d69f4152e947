"""Metrics of tool calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from agent_loop.runtime.numeric import as_finite_number
from agent_loop.training.metrics import TOOLS
from agent_loop.trajectory import Feedback, IncidentKind, Trajectory, branch_weights, without_lost
from agent_loop.types import Origin


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
        prefix, total = f"{TOOLS}{name}/", sum(weight for _, weight in made)
        num_failed = sum(weight for feedback, weight in made if feedback.incident is not None)
        metrics[f"{prefix}calls"] = total / sum(weights)
        metrics[f"{prefix}failed_share"] = num_failed / total
        metrics |= {f"{prefix}{key}/mean": value for key, value in _means(made).items()}
    return metrics


def _means(calls: Iterable[tuple[Feedback, float]]) -> dict[str, float]:
    values: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for call, weight in calls:
        for key, value in {**call.extra, "reward": call.reward}.items():
            number = as_finite_number(value)
            if number is not None:
                values[str(key)].append((number, weight))
    return {
        key: sum(number * weight for number, weight in numbers) / sum(weight for _, weight in numbers)
        for key, numbers in sorted(values.items())
    }
