"""Workers on scripted servers, and checks that they leak nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import MultiTurnConfig
from agent_loop.environments.factory import EnvironmentFactory
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.interactions.base import BaseInteraction
from agent_loop.loops import ToolAgentLoop
from agent_loop.loops.base import LoopContext
from agent_loop.loops.registry import LoopRegistry
from agent_loop.rollout.gate import AdmissionGate
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.monitor import TrajectoryMonitor
from agent_loop.rollout.worker import AgentLoopWorker
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import Script, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.trajectory import Trajectory
from tests.helpers import hermes_template, user

assert ToolAgentLoop

SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class Adder(BaseTool):
    """Tool that adds two numbers and counts its instances. Its config sets its delay, reply, rewards and errors."""

    def __init__(self, config: Mapping[str, Any] | None = None, *, name: str = "add") -> None:
        super().__init__(config or {}, {**SCHEMA, "function": {**SCHEMA["function"], "name": name}})
        self.open: set[str] = set()
        self.num_created = 0
        self.num_released = 0
        self.executed: list[dict[str, Any]] = []
        self.max_concurrent_calls = 0
        self._num_running = 0

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self.num_created += 1
        self.open.add(instance_id)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        assert instance_id in self.open
        self.executed.append(parameters)
        self._num_running += 1
        self.max_concurrent_calls = max(self.max_concurrent_calls, self._num_running)
        try:
            await asyncio.sleep(self.config.get("latency_s", 0))
        finally:
            self._num_running -= 1
        if "raises" in self.config:
            raise self.config["raises"]
        text = self.config.get("says", str(parameters["a"] + parameters["b"]))
        response = ToolResponse(text=text, ends_episode=self.config.get("ends", False))
        return response, self.config.get("reward"), {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        return self.config.get("verdict")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.num_released += 1
        self.open.discard(instance_id)
        if "release_raises" in self.config:
            raise self.config["release_raises"]


class WorkerHarness:
    """Worker with one scripted server."""

    def __init__(
        self,
        script: Script,
        *,
        tools: Sequence[BaseTool] = (),
        interactions: Mapping[str, BaseInteraction] | None = None,
        environments: Mapping[str, EnvironmentFactory] | None = None,
        multi_turn: MultiTurnConfig | None = None,
        agent: str = "tool_agent",
        reward: Any = None,
        max_concurrent: int | None = None,
        silence_s: float | None = None,
        template: ChatTemplate | None = None,
        server: ScriptedServer | None = None,
        request_timeout_s: float | None = None,
        vocab_size: int | None = None,
        retries: int = 0,
        **limits: Any,
    ) -> None:
        multi_turn = multi_turn or MultiTurnConfig()
        self.server = server or ScriptedServer(script)
        self.server_manager = AsyncLLMServerManager(
            [self.server], request_timeout_s=request_timeout_s, vocab_size=vocab_size
        )
        defaults = {
            "prompt_length": 4096,
            "response_length": 4096,
            "max_assistant_turns": multi_turn.max_assistant_turns,
            "max_user_turns": multi_turn.max_user_turns,
            "max_turn_tokens": multi_turn.max_turn_tokens,
        }
        context = LoopContext(
            server_manager=self.server_manager,
            template=template or hermes_template(),
            limits=EpisodeLimits(**{**defaults, **limits}),
            multi_turn=multi_turn,
            tools={tool.name: tool for tool in tools},
            interactions=interactions or {},
            environments=environments or {},
        )
        gate = AdmissionGate() if max_concurrent is None else AdmissionGate(bound=max_concurrent)
        self.worker = AgentLoopWorker(
            context,
            loops=LoopRegistry(),
            default_agent_loop=agent,
            reward=reward,
            gate=gate,
            monitor=None
            if silence_s is None
            else TrajectoryMonitor(gate=gate, pool=self.server_manager.pool, silence_s=silence_s),
            retries=retries,
        )

    def run_one(self, **row: Any) -> Trajectory:
        """Run one row in virtual time and check that nothing leaked."""
        [trajectory] = self.run([{"raw_prompt": user("What is 1 + 2?"), **row}])
        return trajectory

    def run(self, rows: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
        async def scenario() -> list[Trajectory]:
            trajectories = await self.worker.run(self.jobs(rows))
            self.assert_nothing_is_left()
            return trajectories

        return run_virtual(scenario())

    def jobs(self, rows: Sequence[Mapping[str, Any]]) -> list[Job]:
        return [Job(row, group, 0, {"temperature": 1.0}) for group, row in enumerate(rows)]

    def assert_nothing_is_left(self) -> None:
        assert self.server_manager.pool.balancer.num_leases == 0
        assert self.server_manager.pool.balancer.num_sessions == 0
        assert self.server.num_running == 0
        assert self.server.num_sessions == 0
        assert self.worker.running == ()
        assert asyncio.all_tasks() == {asyncio.current_task()}
