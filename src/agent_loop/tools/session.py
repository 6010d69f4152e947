"""Tools of one trajectory: opened at first use, limited in time, closed exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast
from uuid import uuid4
from weakref import WeakKeyDictionary

from msgspec import structs

from agent_loop.errors import (
    DataError,
    EnvironmentUnavailable,
    EpisodeError,
    ToolBug,
    ToolError,
    ToolUnavailable,
    WorkspaceError,
    did_you_mean,
)
from agent_loop.runtime.describe import describe_error, describe_value, one_line
from agent_loop.runtime.instances import OnReplay, TrajectoryInstance, close_instances
from agent_loop.runtime.isolated_task import Abandoned, DeadlineExpired
from agent_loop.runtime.user_code import run_bounded
from agent_loop.runtime.user_values import MAX_TEXT
from agent_loop.tools.base import ArgumentChecking, BaseTool, check_declarations
from agent_loop.tools.results import ToolResult, failed_result, read_result, read_reward
from agent_loop.tools.schema import coerce_arguments
from agent_loop.trajectory import Incident, IncidentKind
from agent_loop.trajectory.copying import copied
from agent_loop.types import ToolCall

KWARGS_KEYS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


@dataclass(frozen=True, slots=True)
class ToolSessionConfig:
    """Time limits of one trajectory's tools."""

    timeout_s: float
    """Seconds for one call of a tool without its own `timeout_s`, including the `create` before the first call."""
    close_timeout_s: float
    """Seconds for one `calc_reward`, and for one `release`."""


class ToolSession:
    """Tools of one trajectory. Single use.

    Each tool is created once before its first call, also for concurrent calls, and released once by `close`. After a
    failed `create` the tool is released too, since `create` may have set something up; the next call creates it again.

    Args:
        tools: Tools by name.
        config: The time limits.
        tools_kwargs: The row's `{tool: {create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs}}`. None at
            any level counts as absent, since a table has a value of every column in every row.
        trajectory: Part that all instance ids have in common; a new id if None.
    """

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        *,
        config: ToolSessionConfig,
        tools_kwargs: Mapping[str, Any] | None = None,
        trajectory: str | None = None,
    ) -> None:
        self._tools = tools
        self._replay = {name: check_declarations(tool) for name, tool in tools.items()}
        self._config = config
        self._kwargs = _read_tools_kwargs(tools_kwargs or {}, tools=tools)
        self._trajectory = trajectory or uuid4().hex
        self._instances: dict[str, TrajectoryInstance] = {}
        self._incidents: list[Incident] = []
        self._is_closed = False

    def fresh(self, *, trajectory: str | None = None) -> ToolSession:
        """Return another session on the same tools, with its own instances."""
        return ToolSession(self._tools, config=self._config, tools_kwargs=self._kwargs, trajectory=trajectory)

    @property
    def num_open(self) -> int:
        """Number of tool instances that are open."""
        return sum([instance.num_open for instance in self._instances.values()])

    @property
    def has_verdict(self) -> bool:
        """Whether a tool that was used, or is always judged, defines `calc_reward`."""
        used = {name for name, instance in self._instances.items() if instance.instance_id is not None}
        return any(t.has_verdict and (t.is_always_judged or name in used) for name, t in self._tools.items())

    def on_replay(self, name: str) -> OnReplay:
        """Return `on_replay` of a tool; `RECORDED` if there is no tool of that name."""
        return self._replay.get(name, OnReplay.RECORDED)

    def is_read_later(self, name: str) -> bool:
        """Return whether a tool's state is read after its last call."""
        return name in self._tools and self._tools[name].is_read_later

    async def open(self, name: str) -> None:
        """Create a tool's instance without a call, if there is none."""
        if name in self._tools:
            instance = self._instance(self._tools[name], name=name)
            timeout_s = self._tools[name].timeout_s or self._config.timeout_s
            await run_bounded(instance.open, timeout_s=timeout_s, name=f"tool {name!r}")

    async def execute(self, call: ToolCall) -> ToolResult:
        """Execute one call.

        The call waits while `max_concurrent` calls of the tool run, and is retried as the tool allows. An unknown tool,
        invalid arguments, a `ToolError` and a timeout are reported to the model in the result.

        Raises:
            ToolBug: The tool raised any other exception, returned an invalid result, or was abandoned.
            WorkspaceError: The tool's workspace failed.
            EnvironmentUnavailable: The tool's environment cannot be reached.
            EpisodeError: The session is closed.
        """
        if self._is_closed:
            raise EpisodeError(f"tool {call.name!r} was called after close(); use one session per trajectory")
        tool = self._tools.get(call.name)
        if tool is None:
            detail = f"there is no tool {call.name!r}{did_you_mean(call.name, self._tools)}"
            return failed_result(IncidentKind.UNKNOWN_TOOL, detail)
        if tool.check_arguments == ArgumentChecking.COERCE:
            call = structs.replace(call, arguments=coerce_arguments(tool.tool_schema, call.arguments))
        is_checked = tool.check_arguments != ArgumentChecking.OFF
        problem = tool.arguments_check.find_error(call.arguments) if is_checked else None
        if problem is not None:
            return failed_result(IncidentKind.INVALID_ARGUMENTS, f"{call.name}: {problem}")
        run = partial(self._run, tool, call)
        if tool.retries:
            run = partial(with_retries, tool, run)
        run = partial(
            run_bounded,
            run,
            timeout_s=tool.timeout_s or self._config.timeout_s,
            name=f"tool {call.name!r}",
        )
        try:
            return await (run() if tool.max_concurrent is None else limit_concurrency(tool, run))
        except Abandoned as error:
            raise ToolBug(
                f"tool {call.name!r} {error}; let CancelledError pass, or raise rollout.multi_turn.tool_timeout_s"
            ) from error
        except DeadlineExpired as error:
            return failed_result(IncidentKind.TOOL_TIMEOUT, f"{call.name} {error} and was stopped")
        except ToolUnavailable as error:
            return failed_result(
                IncidentKind.TOOL_UNAVAILABLE, str(error)[:MAX_TEXT] or f"{call.name} is not available"
            )
        except ToolError as error:
            detail = str(error)[:MAX_TEXT] or f"{call.name} failed"
            return failed_result(IncidentKind.TOOL_ERROR, detail)
        except (ToolBug, WorkspaceError, EnvironmentUnavailable):
            raise
        except Exception as error:
            arguments = one_line(repr(call.arguments), max_length=200)
            raise ToolBug(
                f"tool {call.name!r} raised {describe_error(error)} when called with {arguments}; "
                "fix it, or raise ToolError to report the failure to the model"
            ) from error

    async def calc_rewards(self) -> dict[str, float]:
        """Return by name the trajectory reward of each tool that was used, or is always judged, and returns one."""
        for name, tool in self._tools.items():
            if tool.is_always_judged and tool.has_verdict:
                try:
                    await self.open(name)
                except WorkspaceError:
                    raise
                except Exception as error:
                    raise ToolBug(
                        f"create of tool {name!r} raised {describe_error(error)}; fix it"
                    ) from error
        verdicts = await self._verdicts(of=tuple(OnReplay))
        return {name: verdict for name, verdict in verdicts.items() if verdict is not None}

    async def verdicts_at_a_cut(self) -> dict[str, float | None]:
        """Return the current rewards of the tools that were used and whose state cannot be restored on resume."""
        return await self._verdicts(of=(OnReplay.RESTART,))

    async def _verdicts(self, *, of: Collection[OnReplay]) -> dict[str, float | None]:
        verdicts: dict[str, float | None] = {}
        for name, instance in self._instances.items():
            tool = self._tools[name]
            if instance.instance_id is None or not tool.has_verdict or self._replay[name] not in of:
                continue
            where = f"calc_reward of tool {name!r}"
            kwargs = self._kwargs_of(name, "calc_reward_kwargs")
            verdict = partial(self._verdict, name, instance.instance_id, kwargs)
            timeout_s = tool.close_timeout_s or self._config.close_timeout_s
            try:
                reward = await run_bounded(verdict, timeout_s=timeout_s, name=where)
            except DeadlineExpired as error:
                raise ToolBug(f"{where} {error}; fix it, or raise close_timeout_s") from error
            except (ToolBug, WorkspaceError):
                raise
            except Exception as error:
                raise ToolBug(f"{where} raised {describe_error(error)}; fix it") from error
            verdicts[name] = reward
        return verdicts

    async def close(self) -> list[Incident]:
        """Release all instances concurrently, and return the incidents. A cancellation does not interrupt it."""
        self._is_closed = True
        await close_instances(
            self._instances.values(),
            what="its tools",
            timeout_s=max(
                [
                    self._config.close_timeout_s,
                    *(self._tools[n].close_timeout_s or 0 for n in self._instances),
                ]
            ),
            incidents=self._incidents,
        )
        return list(self._incidents)

    async def _run(self, tool: BaseTool, call: ToolCall) -> ToolResult:
        instance_id = await self._instance(tool, name=call.name).open()
        returned = await tool.execute(
            instance_id, copied(call.arguments), **self._kwargs_of(call.name, "execute_kwargs")
        )
        return read_result(returned, name=call.name)

    async def _verdict(self, name: str, instance_id: str, kwargs: Mapping[str, Any]) -> float | None:
        reward = await self._tools[name].calc_reward(instance_id, **kwargs)
        return None if reward is None else read_reward(reward, where=f"calc_reward of tool {name!r}")

    def _instance(self, tool: BaseTool, *, name: str) -> TrajectoryInstance:
        if name not in self._instances:
            self._instances[name] = TrajectoryInstance(
                f"tool {name!r}",
                trajectory=self._trajectory,
                open_as=partial(tool.create, **self._kwargs_of(name, "create_kwargs")),
                close_as=partial(tool.release, **self._kwargs_of(name, "release_kwargs")),
                has_state=tool.has_state,
            )
        return self._instances[name]

    def _kwargs_of(self, name: str, key: str) -> dict[str, Any]:
        return self._kwargs.get(name, {}).get(key, {})


def _read_tools_kwargs(
    tools_kwargs: Mapping[str, Any], *, tools: Mapping[str, BaseTool]
) -> dict[str, dict[str, dict[str, Any]]]:
    read: dict[str, dict[str, dict[str, Any]]] = {}
    for name, groups in tools_kwargs.items():
        if groups is None:
            continue
        if name not in tools:
            raise DataError(f"tools_kwargs names an unknown tool {name!r}{did_you_mean(name, tools)}")
        read[name] = {}
        for key, kwargs in _mapping(groups, where=f"tools_kwargs[{name!r}]").items():
            if key not in KWARGS_KEYS:
                raise DataError(
                    f"tools_kwargs[{name!r}]: unknown key {key!r}{did_you_mean(key, KWARGS_KEYS)}"
                )
            if kwargs is not None:
                read[name][key] = dict(_mapping(kwargs, where=f"tools_kwargs[{name!r}][{key!r}]"))
    return read


def _mapping(value: Any, *, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is {describe_value(value)}; give a mapping")
    return cast(Mapping[str, Any], value)


ResultT = TypeVar("ResultT")

RETRY_DELAY_S = 0.25
"""Delay before the first retry; doubled before each further retry."""


async def limit_concurrency(tool: BaseTool, run: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Run a call when fewer than `max_concurrent` calls of the tool are running on this event loop."""
    semaphores = _SEMAPHORES.setdefault(asyncio.get_running_loop(), WeakKeyDictionary())
    if tool not in semaphores:
        semaphores[tool] = asyncio.Semaphore(tool.max_concurrent or 1)
    async with semaphores[tool]:
        return await run()


async def with_retries(tool: BaseTool, run: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Run a call, and retry it up to `tool.retries` times when it raises `ToolUnavailable`."""
    for attempt in range(tool.retries):
        try:
            return await run()
        except ToolUnavailable:
            await asyncio.sleep(RETRY_DELAY_S * 2**attempt)
    try:
        return await run()
    except ToolUnavailable as error:
        raise ToolUnavailable(f"{error} (tried {tool.retries + 1} times)") from error


_SEMAPHORES: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[Any, asyncio.Semaphore]] = (
    WeakKeyDictionary()
)
