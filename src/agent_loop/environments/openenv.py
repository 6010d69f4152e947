"""Environments behind OpenEnv servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal, cast

import aiohttp

from agent_loop.config import PositiveSeconds, Section
from agent_loop.environments.base import Environment, EnvironmentTool, Reply
from agent_loop.environments.suite import SizedOptions, TaskSuite
from agent_loop.errors import ConfigError, DataError, EnvironmentUnavailable, ToolError
from agent_loop.runtime.describe import describe_error
from agent_loop.tools.base import ToolResponse
from agent_loop.types import Message

MCP_ACTIONS = frozenset({"Action", "CallToolAction", "ListToolsAction"})
"""Titles of the action schemas of servers whose actions are calls of tools."""
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 2.0
"""Seconds between two attempts to start a session while no server accepts one."""
UNAVAILABLE = frozenset({"CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"})
"""Codes of errors that do not depend on the action."""
AVOIDED_S = 5.0
"""Seconds for which other servers are preferred to one that failed."""
HEARTBEAT_S = 30.0
"""Seconds between checks of an idle connection."""
CONNECT_S = 10.0
"""Seconds that a server has to accept a connection."""
CLOSE_S = 2.0
"""Seconds that a server has to close a session."""
MAX_MESSAGE_BYTES = 2**27
_open_sessions: Counter[str] = Counter()
_failed_at: dict[str, float] = {}


class OpenEnvOptions(SizedOptions):
    """Options of a server. Row `k` resets the environment with the seed `seed + k`."""

    instruction: str = ""
    """Text before the first observation."""
    reset: str = "{}"
    """Further arguments of the environment's reset, as a JSON object."""
    reward: Literal["sum", "last"] = "sum"
    """Reward of a trajectory: the sum of the rewards of its steps, or the last one."""
    wait_s: PositiveSeconds = 60.0
    """How long a trajectory waits for a server that accepts a session."""


class OpenEnvSuite(TaskSuite):
    """Environments behind OpenEnv servers."""

    name = "openenv"
    extra = ""
    summary = "a running OpenEnv server: openenv:http://HOST:PORT, or several URLs with commas between them"
    options: ClassVar[type[Section]] = OpenEnvOptions
    reward_parts: ClassVar[Mapping[str, str]] = {
        "num_steps": "number of steps that the server executed",
        "is_done": "whether the server ended the episode",
    }
    lists_tasks = False

    def tasks(self) -> Sequence[str]:
        return ()

    def rows(self, task: str, options: Any) -> Iterator[dict[str, Any]]:
        urls = [url.strip().rstrip("/") for url in task.split(",")]
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"openenv:{task}: {url!r} is not a URL; give openenv:http://HOST:PORT")
        reset = _json_object(options.reset, where=f"openenv:{task}: reset")
        for seed in itertools.count(options.seed):
            yield {
                "raw_prompt": [{"role": "user", "content": options.instruction}],
                "task": {
                    "urls": urls,
                    "reset": {"seed": seed, **reset},
                    "reward": options.reward,
                    "wait_s": options.wait_s,
                },
            }

    def environment(self) -> Environment:
        return OpenEnvEnvironment()

    def identity(self, row: Mapping[str, Any]) -> str:
        return json.dumps(row["task"]["reset"], sort_keys=True)


def _json_object(text: str, *, where: str) -> dict[str, Any]:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is {text!r}, which is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {text!r}; give a JSON object")
    return cast(dict[str, Any], value)


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
        """Start a session on one of the servers, and return the result of its reset."""
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
        """Execute an action and return its observation."""
        result = await self._running.request("step", action)
        self._num_steps += 1
        self._is_done = bool(result.get("done"))
        if result.get("reward") is not None:
            self._rewards.append(float(result["reward"]))
        return result.get("observation") or {}

    def _action(self, text: str) -> dict[str, Any]:
        """Return the action of a text: its JSON object, or the value of the only required field."""
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


class InvalidAction(Exception):
    """An action was refused, which the model is told."""


class OpenEnvSession:
    """WebSocket connection to a server, which keeps one environment for it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._is_waiting = False

    async def open(self) -> dict[str, Any]:
        """Connect, and return the server's schemas."""
        _open_sessions[self.url] += 1
        self._http = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(CONNECT_S):
                async with self._http.get(f"{self.url}/schema", raise_for_status=True) as response:
                    schemas: dict[str, Any] = await response.json()
                self._socket = await self._http.ws_connect(
                    f"{self.url}/ws", heartbeat=HEARTBEAT_S, max_msg_size=MAX_MESSAGE_BYTES
                )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise self._unavailable(f"cannot be reached: {describe_error(error)}") from error
        return schemas

    async def request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of its answer.

        Raises:
            EnvironmentUnavailable: The connection ended, or the server refuses the session.
            InvalidAction: The server refuses the action.
            RuntimeError: The environment raised an exception.
        """
        assert self._socket is not None
        if self._is_waiting:
            raise self._unavailable("did not answer an earlier request in time")
        self._is_waiting = True
        with suppress(ConnectionError):  # the reason may have arrived already, and is read next
            await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise self._unavailable(f"closed the connection ({message.type.name})")
        self._is_waiting = False
        answer = message.json()
        if answer["type"] == "error":
            raise self._error(answer["data"])
        _failed_at.pop(self.url, None)
        return answer["data"]

    async def close(self) -> None:
        """End the session."""
        _open_sessions[self.url] -= 1
        if self._socket is not None and not self._socket.closed:
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._socket.send_json({"type": "close"})
                    await self._socket.close()
        if self._http is not None:
            await self._http.close()

    def _error(self, data: Mapping[str, Any]) -> Exception:
        code, text = data.get("code"), str(data.get("message"))
        if code in UNAVAILABLE:
            return self._unavailable(f"refuses the session: {text} ({code})")
        if code == "VALIDATION_ERROR":
            faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in data.get("errors", ())]
            return InvalidAction("; ".join(faults) or text)
        return RuntimeError(f"the environment of {self.url} failed: {text} ({code})")

    def _unavailable(self, problem: str) -> EnvironmentUnavailable:
        _failed_at[self.url] = time.monotonic()
        return EnvironmentUnavailable(f"the OpenEnv server {self.url} {problem}")


def by_preference(urls: Sequence[str]) -> list[str]:
    """Return servers in the order in which a session tries them: by recent failures, then by their open sessions."""
    now = time.monotonic()
    return sorted(
        urls, key=lambda url: (now - _failed_at.get(url, -math.inf) < AVOIDED_S, _open_sessions[url])
    )
