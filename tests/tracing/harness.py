"""Traced rollouts on scripted servers and the real clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_loop.config import AgentConfig, MultiTurnConfig, RolloutConfig, TraceConfig
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import Script, ScriptedServer
from agent_loop.tracing.trace_files import event_lines, read_traces
from agent_loop.trajectory import Trajectory
from tests.helpers import hermes_template, text_reply, tool_call_reply, user

TOOLS = Path(__file__).with_name("traced_tools.py")
ADDS = [tool_call_reply("add", a=1, b=2), text_reply("three")]


def settings(trace: TraceConfig, **rollout: Any) -> RolloutConfig:
    return RolloutConfig(
        trace=trace,
        multi_turn=MultiTurnConfig(tools=[f"{TOOLS}:add"]),
        agent=AgentConfig(default_agent_loop="tool_agent"),
        **{"prompt_length": 100_000, "response_length": 100_000, **rollout},
    )


async def roll_out(
    trace: TraceConfig,
    *,
    script: Script = ADDS,
    rows: Sequence[Mapping[str, Any]] | None = None,
    runs: Sequence[Mapping[str, Any]] = ({"label": "step=3"},),
    **rollout: Any,
) -> list[Trajectory]:
    """Return the trajectories of all runs, after the manager was closed."""
    rows = rows or [{"raw_prompt": user("What is 1 + 2?")}]
    trajectories: list[Trajectory] = []
    config = settings(trace, **rollout)
    async with AgentLoopManager(
        config, servers=[ScriptedServer(script)], template=hermes_template()
    ) as manager:
        for run in runs:
            trajectories += await manager.run(rows, **run)
    return trajectories


def run(trace: TraceConfig, **kwargs: Any) -> list[Trajectory]:
    return asyncio.run(roll_out(trace, **kwargs))


def events_in(path: Path) -> list[dict[str, Any]]:
    """Return the events of all trajectories in a file of the `file` backend, as `agent-loop traces` prints them."""
    return [json.loads(line) for document in read_traces(path) for line in event_lines(document)]
