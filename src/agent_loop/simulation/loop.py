"""The agent of a simulation: completions and waits, without text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.simulation.workload import Plan
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import IntArray, SamplingParams

LOOP_NAME = "simulated_agent"


@dataclass(frozen=True, slots=True)
class Ended:
    """One trajectory that is done."""

    started_s: float
    ended_s: float
    num_cached_tokens: int
    """Of all its prompts."""
    num_known_tokens: int
    """Of all its prompts, those that some server had computed or sampled before."""
    num_preempted: int


class PlannedRun:
    """The plans of a simulation, and what becomes of them."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = {plan.id: plan for plan in plans}
        self.ended: list[Ended] = []
        longest = max((plan.starts[-1] for plan in plans), default=0)
        # (one array and one list for all: each prompt and each completion is a part of them)
        self.context: IntArray = np.zeros(longest + 1, np.int32)
        self._speech = [0] * (longest + 1)

    def says(self, prompt_ids: IntArray, session: str) -> Sequence[int]:
        """What the plan of a session says next."""
        return self._speech[: self.plans[session].tokens_left(len(prompt_ids))]


@register(LOOP_NAME)
class SimulatedAgentLoop(AgentLoopBase):
    """Follows the row's plan."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        plan: Plan = row["plan"]
        run: PlannedRun = row["run"]
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
        run.ended.append(Ended(started, clock(), all_cached, all_known, preempted))
        return AgentLoopOutput(segments=())
