"""Services that are down for a while: an environment and a simulated user, and the retries that trajectories note."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from agent_loop.environments.base import Environment, EnvironmentTool, Reply
from agent_loop.environments.factory import EnvironmentFactory
from agent_loop.errors import EnvironmentUnavailable, InteractionUnavailable
from agent_loop.interactions.scripted import ScriptedInteraction
from agent_loop.trajectory import IncidentKind, Trajectory
from tests.helpers import user
from tests.rollout.harness import SCHEMA

METHODS = ["reset", "call", "reply", "reward"]
"""Methods in which the server may be found to be down."""


class Outage:
    """Server of the environments of a run. It is down for the first attempts of some rows.

    Args:
        method: Method of the environment that finds the server down.
        num_failures: Number of failing attempts by the `number` of a row. Other rows do not fail.
    """

    def __init__(self, *, method: str = "reply", num_failures: Mapping[int, int] | None = None) -> None:
        self.num_attempts: Counter[int] = Counter()
        """Number of attempts by the `number` of the row."""
        self.started_s: list[float] = []
        """Times at which attempts began, in seconds."""
        self.num_open = 0
        self._method = method
        self._num_failures = num_failures or {}

    @property
    def factory(self) -> EnvironmentFactory:
        return EnvironmentFactory(lambda: Station(self), where="station")

    def require(self, method: str, *, number: int) -> None:
        """Raise an error if the server is down for the present attempt of a row."""
        if method == self._method and self.num_attempts[number] <= self._num_failures.get(number, 0):
            raise EnvironmentUnavailable(f"the station is down in {method}")


class Station(Environment):
    """Environment with a tool, a reply, and a reward of 1."""

    def __init__(self, outage: Outage) -> None:
        self._outage = outage
        outage.num_open += 1

    async def reset(self, row: Mapping[str, Any]) -> None:
        self._number = row["number"]
        self._outage.num_attempts[self._number] += 1
        self._outage.started_s.append(asyncio.get_running_loop().time())
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
