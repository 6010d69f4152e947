"""What tools brought, as metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from agent_loop.boundary import as_finite_number
from agent_loop.training.metrics import TOOLS
from agent_loop.trajectory import Feedback, IncidentKind, Trajectory
from agent_loop.types import Origin


def feedback_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Per tool: `calls` per trajectory, the `failed_share` of them, the mean `reward` where there are rewards, and the
    mean of each number that `execute` returned in its third place."""
    calls: defaultdict[str, list[Feedback]] = defaultdict(list)
    for trajectory in trajectories:
        for feedback in trajectory.output.feedback:
            if feedback.origin is Origin.TOOL and feedback.incident is not IncidentKind.UNKNOWN_TOOL:
                calls[feedback.name].append(feedback)
    metrics: dict[str, float] = {}
    for name, made in sorted(calls.items()):
        prefix = f"{TOOLS}{name}/"
        metrics[f"{prefix}calls"] = len(made) / len(trajectories)
        metrics[f"{prefix}failed_share"] = sum(f.incident is not None for f in made) / len(made)
        metrics |= {f"{prefix}{key}/mean": value for key, value in _means(made).items()}
    return metrics


def _means(calls: Iterable[Feedback]) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for call in calls:
        for key, value in {**call.extra, "reward": call.reward}.items():
            number = as_finite_number(value)
            if number is not None:
                values[str(key)].append(number)
    return {key: sum(numbers) / len(numbers) for key, numbers in sorted(values.items())}
