"""Statistics of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from simulation.engine import EngineModel
from simulation.loop import SimulatedTrajectory
from simulation.workload import TrajectoryPlan, new_prompt_tokens


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """Raw results of a simulation."""

    makespan_s: float
    ended: tuple[SimulatedTrajectory, ...]
    num_failed: int


@dataclass(frozen=True, slots=True)
class MakespanBounds:
    """Lower bounds of the makespan."""

    work_s: float
    """Seconds for all work at the rate of full batches."""
    longest_s: float
    """Seconds of the longest trajectory alone on a server."""

    @classmethod
    def of(cls, plans: Sequence[TrajectoryPlan], *, model: EngineModel, capacity: float) -> MakespanBounds:
        """Compute the bounds of a workload.

        Args:
            plans: The trajectories.
            model: Speed and capacity of a server.
            capacity: Capacity of the cluster, in servers of this model.
        """
        decode_s = sum(plan.num_tokens for plan in plans) / model.best_tokens_per_s
        prefill_s = sum(new_prompt_tokens(plan) for plan in plans) / model.prefill_tokens_per_s
        return cls(
            work_s=(decode_s + prefill_s) / capacity,
            longest_s=max((_alone_s(plan, model) for plan in plans), default=0.0),
        )

    @property
    def both_s(self) -> float:
        """The larger of the two bounds."""
        return max(self.work_s, self.longest_s)


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Statistics of one simulation."""

    num_trajectories: int
    num_failed: int
    num_preempted: int
    """Requests that a server preempted because its KV cache was full."""
    makespan_s: float
    perfect_s: float | None
    """Makespan of one server with the capacity of all servers, under the same workload and order."""
    work_bound_s: float
    longest_bound_s: float
    latency_s: dict[str, float]
    """Quantiles of the seconds from a trajectory's start to its end. All start with the run if none is held back."""
    prefix_hit_rate: float
    """Share of cached tokens among the prompt tokens that some server had computed or sampled before."""

    @classmethod
    def of(
        cls, outcome: SimulationOutcome, *, bounds: MakespanBounds, perfect_s: float | None
    ) -> SimulationReport:
        latencies = np.array([e.ended_s - e.started_s for e in outcome.ended] or [0.0])
        known = sum(e.num_known_tokens for e in outcome.ended)
        p50, p90, p99, most = (float(q) for q in np.quantile(latencies, (0.5, 0.9, 0.99, 1.0)))
        return cls(
            num_trajectories=len(outcome.ended) + outcome.num_failed,
            num_failed=outcome.num_failed,
            num_preempted=sum(e.num_preempted for e in outcome.ended),
            makespan_s=outcome.makespan_s,
            perfect_s=perfect_s,
            work_bound_s=bounds.work_s,
            longest_bound_s=bounds.longest_s,
            latency_s={"p50": p50, "p90": p90, "p99": p99, "max": most},
            prefix_hit_rate=sum(e.num_cached_tokens for e in outcome.ended) / known if known else 1.0,
        )

    @property
    def to_perfect(self) -> float | None:
        """Makespan divided by the perfect pool's."""
        return self.makespan_s / self.perfect_s if self.perfect_s else None

    @property
    def to_bound(self) -> float:
        """Makespan divided by the larger of the two bounds."""
        bound = max(self.work_bound_s, self.longest_bound_s)
        return self.makespan_s / bound if bound else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "to_perfect": self.to_perfect, "to_bound": self.to_bound}


def _alone_s(plan: TrajectoryPlan, model: EngineModel) -> float:
    step_s = model.step_s + model.step_s_per_request
    computed_s = plan.num_tokens * step_s + new_prompt_tokens(plan) / model.prefill_tokens_per_s
    return plan.tool_s + computed_s / model.speed
