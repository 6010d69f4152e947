"""Agent loop of a simulation, which requests completions and waits for tools, without text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import IntArray, SamplingParams
from simulation.workload import TrajectoryPlan

LOOP_NAME = "simulated_agent"


@dataclass(frozen=True, slots=True)
class SimulatedTrajectory:
    """Finished trajectory of a simulation."""

    started_s: float
    ended_s: float
    num_cached_tokens: int
    """Cached tokens, summed over the prompts of all turns."""
    num_known_tokens: int
    """Prompt tokens that some server had computed or sampled before, summed over all turns."""
    num_preempted: int


class SimulatedRun:
    """Plans of a simulation, and the trajectories that have ended."""

    def __init__(self, plans: Sequence[TrajectoryPlan]) -> None:
        self.plans = {plan.id: plan for plan in plans}
        self.ended: list[SimulatedTrajectory] = []
        longest = max((plan.starts[-1] for plan in plans), default=0)
        # One array and one list, of which every prompt and every completion is a slice.
        self.context: IntArray = np.zeros(longest + 1, np.int32)
        self._sampled = [0] * (longest + 1)

    def next_tokens(self, prompt_ids: IntArray, session: str) -> Sequence[int]:
        """Return the tokens that the model samples next according to the plan of a session."""
        return self._sampled[: self.plans[session].tokens_left(len(prompt_ids))]


@register(LOOP_NAME)
class SimulatedAgentLoop(AgentLoopBase):
    """Agent loop that follows the row's plan."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        plan: TrajectoryPlan = row["plan"]
        run: SimulatedRun = row["run"]
        clock = asyncio.get_running_loop().time
        started, params = clock(), SamplingParams()
        known = all_known = all_cached = preempted = 0
        for number, (turn, start) in enumerate(zip(plan.turns, plan.starts, strict=False)):
            output = await self.context.server_manager.generate(
                plan.id, prompt_ids=run.context[:start], sampling_params=params
            )
            all_known += known
            all_cached += output.num_cached_tokens or 0
            preempted += output.num_preempted
            known = start + turn.num_tokens
            if number + 1 < len(plan.turns):
                await asyncio.sleep(turn.tool_s)
        run.ended.append(SimulatedTrajectory(started, clock(), all_cached, all_known, preempted))
        return AgentLoopOutput(segments=())
