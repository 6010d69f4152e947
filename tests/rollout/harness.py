"""Workers on scripted servers, services that are down for a while, and what is read from trajectories."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import MultiTurnConfig
from agent_loop.environments.base import Environment, EnvironmentTool, Reply
from agent_loop.environments.factory import EnvironmentFactory
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.errors import EnvironmentUnavailable, InteractionUnavailable
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.scripted import ScriptedInteraction
from agent_loop.loops import ToolAgentLoop
from agent_loop.loops.base import LoopContext
from agent_loop.loops.registry import LoopRegistry
from agent_loop.rollout.gate import AdmissionGate
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.monitor import TrajectoryMonitor
from agent_loop.rollout.worker import AgentLoopWorker
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import Script, ScriptedServer
from agent_loop.storage.columns import StepFacts, columns_of
from agent_loop.storage.json_lines import to_line
from agent_loop.testing import run_virtual
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.trajectory import IncidentKind, Trajectory
from agent_loop.types import StopReason
from tests.helpers import hermes_template, user

assert ToolAgentLoop

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}


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

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
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
        turn_limits = ("max_assistant_turns", "max_user_turns", "max_turn_tokens")
        defaults = {name: getattr(multi_turn, name) for name in turn_limits}
        context = LoopContext(
            server_manager=self.server_manager,
            template=template or hermes_template(),
            limits=EpisodeLimits(**{"prompt_length": 4096, "response_length": 4096, **defaults, **limits}),
            multi_turn=multi_turn,
            tools={tool.name: tool for tool in tools},
            interactions=interactions or {},
            environments=environments or {},
        )
        gate = AdmissionGate() if max_concurrent is None else AdmissionGate(bound=max_concurrent)
        monitor = TrajectoryMonitor(gate=gate, pool=self.server_manager.pool, silence_s=silence_s)
        self.worker = AgentLoopWorker(
            context,
            loops=LoopRegistry(),
            default_agent_loop=agent,
            reward=reward,
            gate=gate,
            monitor=None if silence_s is None else monitor,
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
        balancer = self.server_manager.pool.balancer
        assert balancer.num_leases == balancer.num_sessions == 0
        assert self.server.num_running == self.server.num_sessions == 0
        assert self.worker.running == ()
        assert asyncio.all_tasks() == {asyncio.current_task()}


def error_of(trajectory: Trajectory) -> str:
    """Return the error that failed a trajectory."""
    assert trajectory.output.stop_reason is StopReason.FAILED
    assert trajectory.output.failure is not None
    return trajectory.output.failure.error


def kinds(trajectory: Trajectory) -> list[IncidentKind]:
    """Return the kinds of the incidents that a trajectory notes."""
    return [incident.kind for incident in trajectory.output.incidents]


def replies(trajectory: Trajectory) -> list[str]:
    """Return the texts of the messages of tools."""
    return [message["content"] for message in trajectory.output.messages if message["role"] == "tool"]


METHODS = ["reset", "call", "reply", "reward"]
"""Methods in which the server may be found to be down."""


@dataclass
class Outage:
    """Server of the environments of a run. It is down for the first attempts of some rows."""

    method: str = "reply"
    """Method of the environment that finds the server down."""
    num_failures: Mapping[int, int] = field(default_factory=dict[int, int])
    """Number of failing attempts by the `number` of a row. Other rows do not fail."""
    num_attempts: Counter[int] = field(default_factory=Counter[int])
    """Number of attempts by the `number` of the row."""
    num_open: int = 0

    @property
    def factory(self) -> EnvironmentFactory:
        return EnvironmentFactory(lambda: Station(self), where="station")

    def require(self, method: str, *, number: int) -> None:
        """Raise an error if the server is down for the present attempt of a row."""
        if method == self.method and self.num_attempts[number] <= self.num_failures.get(number, 0):
            raise EnvironmentUnavailable(f"the station is down in {method}")


class Station(Environment):
    """Environment with a tool, a reply, and a reward of 1."""

    def __init__(self, outage: Outage) -> None:
        self._outage = outage
        outage.num_open += 1

    async def reset(self, row: Mapping[str, Any]) -> None:
        self._number = row["number"]
        self._outage.num_attempts[self._number] += 1
        self._require("reset")

    def tools(self) -> list[EnvironmentTool]:
        return [EnvironmentTool(SCHEMA)]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        self._require("call")
        return str(arguments["a"] + arguments["b"])

    async def reply(self, messages: Any) -> Reply:
        self._require("reply")
        return Reply(is_over=True)

    async def reward(self, messages: Any) -> float:
        self._require("reward")
        return 1.0

    async def close(self) -> None:
        self._outage.num_open -= 1

    def _require(self, method: str) -> None:
        self._outage.require(method, number=self._number)


class Line(ScriptedInteraction):
    """Simulated user whose server is down for the first conversations."""

    def __init__(self, *, num_failures: int) -> None:
        super().__init__(["Thanks."], name="line")
        self.num_conversations = 0
        self._num_failures = num_failures

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        await super().start_interaction(instance_id, **kwargs)
        self.num_conversations += 1

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        if self.num_conversations <= self._num_failures:
            raise InteractionUnavailable("the simulated user's server is down")
        return await super().generate_response(instance_id, messages, **kwargs)


def station_row(number: int = 0, **columns: Any) -> dict[str, Any]:
    """Return a row that is played in an environment `station`."""
    return {
        "raw_prompt": user(f"question {number}"),
        "number": number,
        "environment": "station",
        "agent_name": "environment_agent",
        **columns,
    }


def retries_of(trajectory: Trajectory) -> list[str]:
    """Return the details of the repetitions that a trajectory notes."""
    return [i.detail for i in trajectory.output.incidents if i.kind is IncidentKind.RETRIED]


def as_line(trajectory: Trajectory) -> dict[str, Any]:
    """Return the values of a trajectory's line."""
    facts = StepFacts(0, "rollout", weight_version=None, success_threshold=1.0)
    return json.loads(to_line(columns_of(trajectory, facts=facts)))
