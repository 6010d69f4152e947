"""Conformance checks of tools: does an implementation of `BaseTool` follow its contract?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeAlias, cast

from agent_loop.errors import ConfigError, ToolError
from agent_loop.runtime.concurrency import run_together
from agent_loop.runtime.describe import describe_error, describe_value, one_line
from agent_loop.runtime.incidents import IncidentCollector
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.threads import run_in_thread
from agent_loop.runtime.user_code import run_bounded
from agent_loop.testing.conformance import (
    CheckFailed,
    CheckReport,
    CheckSkipped,
    CheckSuite,
    OnResult,
    count_resources,
    find_leak,
    require,
    require_forgotten,
    require_no_blocking,
)
from agent_loop.tools.base import BaseTool, check_declarations
from agent_loop.tools.results import ToolResult, read_result, read_reward
from agent_loop.tools.schema import check_arguments, check_tool_schema

Arguments: TypeAlias = Mapping[str, Any]
END_S = 2.0
"""Seconds in which a cancelled call must end."""
NUM_CONCURRENT = 16
NUM_ROUNDS = 3
CANCEL_AFTER = (1, 2, 3, 4, 5, 6, 8, 12, 20)
"""Iterations of the event loop after which a call is cancelled, one after the other."""
MAX_EDGES = 60
EDGES: Mapping[str, tuple[Any, ...]] = {
    "string": ("", " ", "0", "\0", "\N{GRINNING FACE}'\"\\\n", "../..", "<|im_end|>", "x" * 5000),
    "integer": (0, -1, 1, 2**31, -(2**63), 10**30),
    "number": (0, -1, 0.5, 1e-300, -1e300, 10**30),
    "boolean": (True, False),
    "array": ([],),
    "object": ({},),
    "null": (None,),
}
"""Unusual values by the type of a schema."""


async def check_tool(
    tool: BaseTool,
    *,
    calls: Sequence[Mapping[str, Any]],
    create_kwargs: Mapping[str, Any] | None = None,
    execute_kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    on_result: OnResult | None = None,
) -> CheckReport:
    """Check that a tool follows the contract of `BaseTool`.

    The tool is really called, about a hundred times, with unusual arguments among them. Point a tool with side effects
    at something that they cannot harm.

    Args:
        calls: Arguments of calls that succeed. Give several with different results if possible.
        create_kwargs: Arguments of `create`, as in a row's `tools_kwargs[name]["create_kwargs"]`.
        execute_kwargs: Arguments of `execute`, as in a row's `tools_kwargs[name]["execute_kwargs"]`.
        timeout_s: Time limit of each check.
        on_result: Called with each result as soon as it is known.

    Raises:
        ConfigError: `calls` is empty.
    """
    if not calls:
        raise ConfigError("check_tool needs the arguments of at least one call")
    subject = CheckedTool(tool, calls, create_kwargs or {}, execute_kwargs or {})
    return await TOOL_CHECKS.run(
        subject, name=f"tool {tool.name!r}", timeout_s=timeout_s, on_result=on_result
    )


@dataclass(frozen=True, slots=True)
class CallResult:
    """Comparable part of what a call returned."""

    text: str
    reward: float | None = None
    ends_episode: bool = False
    is_error: bool = False

    def __str__(self) -> str:
        return one_line(
            f"{'error ' if self.is_error else ''}{self.text!r}, reward {self.reward}", max_length=120
        )


@dataclass(frozen=True, slots=True, eq=False)
class CheckedTool:
    """Tool under check, and the arguments to call it with."""

    tool: BaseTool
    calls: Sequence[Arguments]
    create_kwargs: Mapping[str, Any]
    execute_kwargs: Mapping[str, Any]
    _numbers: count[int] = field(default_factory=count)

    @property
    def on_replay(self) -> OnReplay:
        return OnReplay(self.tool.on_replay)

    def new_id(self) -> str:
        """Return a new instance id."""
        return f"check{next(self._numbers)}-0"

    @asynccontextmanager
    async def created(self) -> AsyncGenerator[str]:
        """Create an instance, yield its id, and release it at the end."""
        instance_id = self.new_id()
        try:
            await self.create(instance_id)
            yield instance_id
        finally:
            await self.release(instance_id)

    async def create(self, instance_id: str) -> None:
        await _bounded(partial(self.tool.create, instance_id, **self.create_kwargs))

    async def release(self, instance_id: str) -> None:
        await _bounded(partial(self.tool.release, instance_id))

    async def calc_reward(self, instance_id: str) -> float | None:
        """Return the reward of a trajectory."""
        reward = await _bounded(partial(self.tool.calc_reward, instance_id))
        return None if reward is None else read_reward(reward, where="calc_reward")

    async def execute(self, instance_id: str, arguments: Arguments) -> ToolResult:
        """Call the tool and return its result."""
        given = json.loads(json.dumps(arguments))
        returned = await _bounded(partial(self.tool.execute, instance_id, given, **self.execute_kwargs))
        return read_result(returned, name=self.tool.name)

    async def call(self, instance_id: str, arguments: Arguments) -> CallResult:
        """Call the tool and return the result in a form that can be compared. A `ToolError` is a result."""
        try:
            result = await self.execute(instance_id, arguments)
        except ToolError as error:
            return CallResult(str(error), is_error=True)
        except Exception as error:
            what = one_line(json.dumps(arguments), max_length=120)
            raise CheckFailed(f"called with {what}, it raised {describe_error(error)}") from error
        return CallResult(result.response.text or "", result.reward, result.response.ends_episode)

    async def run_trajectory(self, calls: Sequence[Arguments] | None = None) -> list[CallResult]:
        """Make calls one after the other in a new trajectory, and return their results."""
        async with self.created() as instance_id:
            return [await self.call(instance_id, arguments) for arguments in calls or self.calls]

    async def is_reproducible(self) -> bool:
        """Return whether the same calls have the same results in another trajectory."""
        return await self.run_trajectory() == await self.run_trajectory()


async def _bounded(function: Callable[[], Awaitable[Any]]) -> Any:
    """Await a method of the tool. `SystemExit` becomes RuntimeError, and a method that ignores a cancellation is
    abandoned."""
    return await run_bounded(function, timeout_s=None, grace_s=END_S)


def require_same(got: Sequence[CallResult], wanted: Sequence[CallResult], what: str) -> None:
    """Fail the check at the first result that differs."""
    for number, (one, other) in enumerate(zip(got, wanted, strict=True), start=1):
        if one != other:
            raise CheckFailed(f"{what}, call {number} returns {one}, not {other}")


TOOL_CHECKS = CheckSuite[CheckedTool]()
check = TOOL_CHECKS.check


@check("the schema is valid, and the calls match it")
async def _schema(subject: CheckedTool) -> None:
    check_tool_schema(subject.tool.tool_schema, where="its schema")
    for arguments in subject.calls:
        fault = check_arguments(subject.tool.tool_schema, arguments)
        require(fault is None, f"the call with {describe_value(arguments)} does not match it: {fault}")


@check("on_replay and retries are compatible")
async def _declarations(subject: CheckedTool) -> str:
    check_declarations(subject.tool)
    return f"on_replay={subject.on_replay}, retries={subject.tool.retries}"


@check("a call returns a response, an optional reward and extra data")
async def _answers(subject: CheckedTool) -> str:
    results = await subject.run_trajectory()
    num_errors = sum(result.is_error for result in results)
    require(num_errors < len(results), f"every call failed, as in {results[0]}; give a call that succeeds")
    return "; ".join(map(str, results[:2]))


@check("the extra data of a call can be written as JSON")
async def _extra(subject: CheckedTool) -> None:
    async with subject.created() as instance_id:
        for arguments in subject.calls:
            with suppress(ToolError), IncidentCollector("check") as collector:
                extra = (await subject.execute(instance_id, arguments)).extra
                for incident in collector.incidents:
                    raise CheckFailed(f"it cannot be written as JSON: {incident.detail}")
                try:
                    json.dumps(dict(extra))
                except (TypeError, ValueError) as error:
                    raise CheckFailed(
                        f"{describe_value(extra)} cannot be written as JSON: {error}"
                    ) from error


@check("calc_reward returns a number or None")
async def _reward(subject: CheckedTool) -> str:
    async with subject.created() as instance_id:
        for arguments in subject.calls:
            await subject.call(instance_id, arguments)
        reward = await subject.calc_reward(instance_id)
    return "None" if reward is None else f"{reward:g}"


@check("a trajectory may end before its first call")
async def _unused(subject: CheckedTool) -> None:
    async with subject.created() as instance_id:
        await subject.calc_reward(instance_id)


@check("unusual arguments that match the schema get a response")
async def _edges(subject: CheckedTool) -> str:
    edges = edge_arguments(subject.tool.tool_schema, subject.calls[0])
    async with subject.created() as instance_id:
        results = [await subject.call(instance_id, arguments) for arguments in edges]
    return f"{len(results)} calls, {sum(result.is_error for result in results)} of them failed"


@check("concurrent trajectories do not share state")
async def _separate(subject: CheckedTool) -> None:
    if not await subject.is_reproducible():
        raise CheckSkipped("the same calls return different results each time")
    calls, others = list(subject.calls), list(reversed(subject.calls))
    async with subject.created() as one:
        alone = [await subject.call(one, arguments) for arguments in calls]
        reward_alone = await subject.calc_reward(one)
    async with subject.created() as one, subject.created() as two:
        together: list[CallResult] = []
        for arguments, other_arguments in zip(calls, others, strict=True):
            together.append(await subject.call(one, arguments))
            await subject.call(two, other_arguments)
        reward = await subject.calc_reward(one)
    require_same(together, alone, "beside another trajectory")
    require(
        reward == reward_alone,
        f"beside another trajectory, calc_reward returns {reward}, not {reward_alone}",
    )


@check("many concurrent trajectories all get responses")
async def _many(subject: CheckedTool) -> None:
    is_reproducible = await subject.is_reproducible()
    alone = await subject.run_trajectory()
    for results in await run_together(subject.run_trajectory() for _ in range(NUM_CONCURRENT)):
        if is_reproducible:
            require_same(results, alone, f"beside {NUM_CONCURRENT - 1} other trajectories")


@check("concurrent calls of one trajectory all get responses")
async def _parallel(subject: CheckedTool) -> None:
    async with subject.created() as instance_id:
        await run_together(subject.call(instance_id, arguments) for arguments in [*subject.calls] * 3)


@check("repeated calls behave as on_replay declares")
async def _replay(subject: CheckedTool) -> str:
    if subject.on_replay not in (OnReplay.RECORDED, OnReplay.RERUN):
        raise CheckSkipped(f"it declares on_replay={subject.on_replay}")
    if not await subject.is_reproducible():
        if subject.on_replay is OnReplay.RERUN:
            raise CheckFailed("it declares on_replay=rerun, but the same calls return different results")
        raise CheckSkipped("the same calls return different results each time")
    if subject.on_replay is OnReplay.RERUN:
        return "the same calls restore the same state"
    alone = [(await subject.run_trajectory([arguments]))[0] for arguments in subject.calls]
    twice = await subject.run_trajectory([*subject.calls, *subject.calls])
    require_same(twice, [*alone, *alone], "it declares on_replay=recorded, but after other calls")
    return "results do not depend on earlier calls"


@check("the tool does not block the event loop")
async def _blocking(subject: CheckedTool) -> str:
    async def work() -> None:
        async with subject.created() as instance_id:
            await subject.call(instance_id, subject.calls[0])
            await subject.calc_reward(instance_id)

    return await require_no_blocking(work)


@check("release leaves nothing behind")
async def _forgotten(subject: CheckedTool) -> None:
    before = asyncio.all_tasks()
    async with subject.created() as instance_id:
        await subject.call(instance_id, subject.calls[0])
    require_forgotten(instance_id, subject.tool, after="release")
    await asyncio.sleep(0)
    running = asyncio.all_tasks() - before
    require(not running, f"tasks still run after release, such as {next(iter(running), None)}")
    held = count_resources()
    for _ in range(NUM_ROUNDS):
        await subject.run_trajectory(subject.calls[:1])
    leaked = await find_leak(NUM_ROUNDS, since=held)
    require(leaked is None, f"each trajectory leaks one {leaked}")


@check("an instance whose create failed can be released")
async def _never_created(subject: CheckedTool) -> None:
    await subject.release(subject.new_id())


@check("an instance whose create was cancelled can be released")
async def _cancelled_create(subject: CheckedTool) -> None:
    for num_iterations in CANCEL_AFTER:
        instance_id = subject.new_id()
        was_done = await _run_and_cancel(subject.create(instance_id), num_iterations=num_iterations)
        await subject.release(instance_id)
        require_forgotten(instance_id, subject.tool, after="release")
        if was_done:
            break


@check("a cancelled call ends quickly and does not affect later calls")
async def _cancelled_call(subject: CheckedTool) -> None:
    for num_iterations in CANCEL_AFTER:
        async with subject.created() as instance_id:
            call = subject.call(instance_id, subject.calls[0])
            was_done = await _run_and_cancel(call, num_iterations=num_iterations)
        await subject.run_trajectory()
        if was_done:
            break


@check("the tool works on a second event loop")
async def _second_loop(subject: CheckedTool) -> None:
    await subject.run_trajectory()
    await run_in_thread(lambda: asyncio.run(subject.run_trajectory()))


async def _run_and_cancel(call: Coroutine[Any, Any, object], *, num_iterations: int) -> bool:
    """Start a call and cancel it after a number of iterations of the event loop.

    Returns:
        Whether the call was done before the cancellation.
    """
    clock = asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as group:
        task = group.create_task(call)
        for _ in range(num_iterations):
            await asyncio.sleep(0)
        was_done = task.done()
        task.cancel()
        started = clock()
        await asyncio.wait({task})
    require(clock() - started < END_S, f"it still ran {END_S:g} s after it was cancelled")
    return was_done


def edge_arguments(tool_schema: Mapping[str, Any], example: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return unusual calls that match the schema.

    They are variants of the example: one argument replaced or left out, or only the required arguments.
    """
    fitting: list[dict[str, Any]] = []
    for arguments in _variants(tool_schema["function"].get("parameters") or {}, example):
        if arguments not in fitting and check_arguments(tool_schema, arguments) is None:
            fitting.append(arguments)
    return fitting[:MAX_EDGES]


def _variants(parameters: Mapping[str, Any], example: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    properties: Mapping[str, Any] = parameters.get("properties", {})
    yield {name: example[name] for name in parameters.get("required", []) if name in example}
    for name, schema in properties.items():
        yield {other: value for other, value in example.items() if other != name}
        for value in _values(schema):
            yield {**example, name: value}


def _values(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield unusual values that a schema may allow. Lists are empty, or hold one unusual item."""
    types: Any = schema.get("type", list(EDGES))
    for type_ in cast(list[str], types) if isinstance(types, list) else [types]:
        yield from EDGES.get(type_, ())
        if type_ == "array":
            yield from ([item] for item in _values(schema.get("items") or {"type": "string"}))
