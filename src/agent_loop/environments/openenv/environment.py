"""The environment of one session of an OpenEnv server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agent_loop.environments.base import Environment, EnvironmentTool, Reply
from agent_loop.environments.openenv.session import InvalidAction, OpenEnvSession, by_preference
from agent_loop.errors import DataError, EnvironmentUnavailable, ToolError
from agent_loop.tools.base import ToolResponse
from agent_loop.types import Message

MCP_ACTIONS = frozenset({"Action", "CallToolAction", "ListToolsAction"})
"""Titles of the action schemas of servers whose actions are calls of tools."""
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 2.0
"""Seconds between two attempts to start a session while no server accepts one."""


class OpenEnvEnvironment(Environment):
    """One session of an OpenEnv server. The tools of the server are the model's; without tools, its text is the action.

    A session that cannot be started or breaks off is an infrastructure failure. A new session starts on another server
    of the row, if there is one, or once a server accepts it.
    """

    def __init__(self) -> None:
        self._session: OpenEnvSession | None = None
        self._tools: list[EnvironmentTool] = []
        self._schema: Mapping[str, Any] = {}
        self._rewards: list[float] = []
        self._num_steps = 0
        self._is_done = False
        self._takes: str = "sum"

    async def reset(self, row: Mapping[str, Any]) -> str:
        task = row["task"]
        self._takes = task["reward"]
        result = await self._start(task)
        self._is_done = bool(result.get("done"))
        text = _text_of(result.get("observation"))
        instruction = str(row["raw_prompt"][-1]["content"])
        if not self._tools and len(self._required) != 1:
            schema = json.dumps(self._schema.get("properties", {}), ensure_ascii=False)
            text += f"\n\nReply with a JSON object. Its fields: {schema}"
        if not instruction + text:
            raise DataError(
                f"the environment of {self._running.url} has no text at its start; say what to do with instruction="
            )
        return f"\n\n{text}" if instruction and text else text

    def tools(self) -> Sequence[EnvironmentTool]:
        return self._tools

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResponse:
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        observation: Mapping[str, Any] = await self._step(action)
        error: Any = observation.get("error")
        if error and not self._is_done:
            raise ToolError(str(error.get("message", error)))
        result: Any = error or observation.get("result", observation)
        if isinstance(result, Mapping):
            result = cast(Mapping[str, Any], result).get("data", cast(Any, result))
        return ToolResponse(text=_text_of(result), ends_episode=self._is_done)

    async def reply(self, messages: Sequence[Message]) -> Reply:
        if self._tools or self._is_done:
            return Reply(is_over=True)
        try:
            observation = await self._step(self._action(str(messages[-1].get("content") or "")))
        except InvalidAction as error:
            return Reply(content=f"Invalid action: {error}")
        return Reply(content=_text_of(observation), is_over=self._is_done)

    def reward(self, messages: Sequence[Message]) -> Mapping[str, Any] | None:
        if not self._rewards:
            return None
        reward = self._rewards[-1] if self._takes == "last" else sum(self._rewards)
        return {"reward": reward, "num_steps": self._num_steps, "is_done": self._is_done}

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def _running(self) -> OpenEnvSession:
        assert self._session is not None
        return self._session

    @property
    def _required(self) -> Sequence[str]:
        return self._schema.get("required", ())

    async def _start(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Start a session on one of the servers, and return the result of its reset.

        Raises:
            EnvironmentUnavailable: No server accepted a session in time.
        """
        loop = asyncio.get_running_loop()
        deadline, delay_s = loop.time() + task["wait_s"], FIRST_DELAY_S
        while True:
            problems: list[str] = []
            for url in by_preference(task["urls"]):
                self._session = OpenEnvSession(url)
                try:
                    return await self._start_on(self._session, task["reset"])
                except EnvironmentUnavailable as error:
                    problems.append(str(error))
                    await self.close()
            if loop.time() + delay_s > deadline:
                raise EnvironmentUnavailable("; ".join(problems))
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _start_on(self, session: OpenEnvSession, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self._schema = (await session.open())["action"]
        self._tools = []
        if self._schema.get("title") in MCP_ACTIONS:
            listed = await session.request("step", {"type": "list_tools"})
            self._tools = [
                EnvironmentTool.of(tool["name"], tool["description"], tool["input_schema"])
                for tool in listed["observation"]["tools"]
            ]
        return await session.request("reset", arguments)

    async def _step(self, action: Mapping[str, Any]) -> Any:
        """Execute an action and return its observation.

        Raises:
            EnvironmentUnavailable: The session ended.
            InvalidAction: The server refused the action.
        """
        result = await self._running.request("step", action)
        self._num_steps += 1
        self._is_done = bool(result.get("done"))
        if result.get("reward") is not None:
            self._rewards.append(float(result["reward"]))
        return result.get("observation") or {}

    def _action(self, text: str) -> dict[str, Any]:
        """Return the action of a text: its JSON object, or the value of the only required field.

        Raises:
            InvalidAction: The text is neither.
        """
        text = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
        required = self._required
        field: Mapping[str, Any] = self._schema.get("properties", {}).get(required[0], {}) if required else {}
        if len(required) == 1 and field.get("type") == "string" and not text.startswith("{"):
            return {required[0]: text}
        try:
            value: Any = json.loads(text)
        except ValueError as error:
            raise InvalidAction(f"the reply is not valid JSON ({error})") from error
        if isinstance(value, dict):
            return cast(dict[str, Any], value)
        if len(required) == 1:
            return {required[0]: value}
        raise InvalidAction("the reply is not a JSON object")


def _text_of(value: Any) -> str:
    """Return an observation as text: its only text, or JSON without empty values."""
    if isinstance(value, Mapping):
        fields = {
            name: item for name, item in cast(Mapping[str, Any], value).items() if item not in (None, {}, [])
        }
        value = next(iter(fields.values())) if len(fields) == 1 else fields
        if not fields:
            return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
