"""What a simulation came to, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from agent_loop.simulation.engine import EngineModel
from agent_loop.simulation.loop import Ended
from agent_loop.simulation.workload import Plan, new_prompt_tokens

WARM_UP_SHARE = 0.02
"""Of the samples; they are left out of the imbalance."""


class Sample(NamedTuple):
    """The servers' load at one time."""

    num_in_flight: int
    num_waiting: int
    imbalance: float
    """Most to mean outstanding work, each server's in relation to its speed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened."""

    makespan_s: float
    ended: tuple[Ended, ...]
    samples: tuple[Sample, ...]
    num_servers: int
    num_failed: int
    first_failure: str | None
    num_failovers: int
    busy_s: float = 0.0
    """Of all servers together."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Makespans that nobody can beat."""

    work_s: float
    """All work at the rate of full batches."""
    longest_s: float
    """The longest trajectory alone on a server of its own."""

    @classmethod
    def of(cls, plans: Sequence[Plan], *, model: EngineModel, capacity: float) -> Bounds:
        """Args: capacity: In servers of this model."""
        decode_s = sum(plan.num_tokens for plan in plans) / model.best_tokens_per_s
        prefill_s = sum(new_prompt_tokens(plan) for plan in plans) / model.prefill_tokens_per_s
        return cls(
            work_s=(decode_s + prefill_s) / capacity,
            longest_s=max((_alone_s(plan, model) for plan in plans), default=0.0),
        )

    @property
    def both_s(self) -> float:
        """The larger one."""
        return max(self.work_s, self.longest_s)


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one simulation."""

    num_trajectories: int
    num_failed: int
    first_failure: str | None
    num_failovers: int
    """Completions that went on at another server."""
    num_preempted: int
    """Requests that a server set aside because its KV cache was full."""
    makespan_s: float
    perfect_s: float | None
    """Makespan of one server with the capacity of all, under the same workload and order."""
    work_bound_s: float
    longest_bound_s: float
    latency_s: dict[str, float]
    """Of trajectories, from their beginning (with all at once, from the run's) to their end."""
    prefix_hit_rate: float
    """Of the prompt tokens that a server had computed or sampled before, those that were cached."""
    imbalance: float
    """Most to mean outstanding work, the mean over the time in which requests waited or every server was busy."""
    utilisation: float
    """Share of the servers' time in which they computed."""

    @classmethod
    def of(cls, outcome: Outcome, *, bounds: Bounds, perfect_s: float | None) -> Report:
        latencies = np.array([e.ended_s - e.started_s for e in outcome.ended] or [0.0])
        known = sum(e.num_known_tokens for e in outcome.ended)
        p50, p90, p99, most = (float(q) for q in np.quantile(latencies, (0.5, 0.9, 0.99, 1.0)))
        total_s = outcome.makespan_s * outcome.num_servers
        return cls(
            num_trajectories=len(outcome.ended) + outcome.num_failed,
            num_failed=outcome.num_failed,
            first_failure=outcome.first_failure,
            num_failovers=outcome.num_failovers,
            num_preempted=sum(e.num_preempted for e in outcome.ended),
            makespan_s=outcome.makespan_s,
            perfect_s=perfect_s,
            work_bound_s=bounds.work_s,
            longest_bound_s=bounds.longest_s,
            latency_s={"p50": p50, "p90": p90, "p99": p99, "max": most},
            prefix_hit_rate=sum(e.num_cached_tokens for e in outcome.ended) / known if known else 1.0,
            imbalance=_imbalance(outcome),
            utilisation=outcome.busy_s / total_s if total_s else 0.0,
        )

    @property
    def to_perfect(self) -> float | None:
        """Makespan in relation to the perfect pool's."""
        return self.makespan_s / self.perfect_s if self.perfect_s else None

    @property
    def to_bound(self) -> float:
        """Makespan in relation to the larger of the two bounds."""
        bound = max(self.work_bound_s, self.longest_bound_s)
        return self.makespan_s / bound if bound else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "to_perfect": self.to_perfect, "to_bound": self.to_bound}


def _imbalance(outcome: Outcome) -> float:
    warm = outcome.samples[round(WARM_UP_SHARE * len(outcome.samples)) :]
    busy = [s.imbalance for s in warm if s.num_waiting or s.num_in_flight >= 4 * outcome.num_servers]
    return float(np.mean(busy)) if busy else 1.0


def _alone_s(plan: Plan, model: EngineModel) -> float:
    step_s = model.step_s + model.step_s_per_request
    computed_s = plan.num_tokens * step_s + new_prompt_tokens(plan) / model.prefill_tokens_per_s
    return plan.tool_s + computed_s / model.speed
