"""Traced rollouts on scripted servers and the real clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_loop import function_tool
from agent_loop.config import AgentConfig, MultiTurnConfig, RolloutConfig, TraceConfig
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import Script, ScriptedServer
from agent_loop.tracing import rollout_trace_op
from agent_loop.tracing.trace_files import event_lines, read_traces
from agent_loop.trajectory import Trajectory
from tests.helpers import hermes_template, text_reply, tool_call_reply, user

ADDS = [tool_call_reply("add", a=1, b=2), text_reply("three")]
ROWS = [{"raw_prompt": user("What is 1 + 2?")}]


class Adder:
    @rollout_trace_op
    def sum_of(self, a: int, b: int) -> int:
        return a + b


@function_tool
async def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first.
        b: The second.
    """
    await asyncio.sleep(0.002)
    return Adder().sum_of(a, b)


def manager_of(
    *servers: ScriptedServer, trace: TraceConfig | None = None, **rollout: Any
) -> AgentLoopManager:
    config = RolloutConfig(
        trace=trace or TraceConfig(),
        multi_turn=MultiTurnConfig(tools=[f"{__name__}:add"]),
        agent=AgentConfig(default_agent_loop="tool_agent"),
        **{"prompt_length": 100_000, "response_length": 100_000, **rollout},
    )
    return AgentLoopManager(config, servers=servers, template=hermes_template())


def run(
    trace: TraceConfig,
    *,
    script: Script = ADDS,
    rows: Sequence[Mapping[str, Any]] = ROWS,
    runs: Sequence[Mapping[str, Any]] = ({"label": "step=3"},),
    **rollout: Any,
) -> list[Trajectory]:
    """Return the trajectories of all runs, after the manager was closed."""

    async def main() -> list[Trajectory]:
        async with manager_of(ScriptedServer(script), trace=trace, **rollout) as manager:
            return [trajectory for run in runs for trajectory in await manager.run(rows, **run)]

    return asyncio.run(main())


def events_in(path: Path) -> list[dict[str, Any]]:
    """Return the events of all trajectories in a file of the `file` backend, as `agent-loop traces` prints them."""
    return [json.loads(line) for document in read_traces(path) for line in event_lines(document)]
