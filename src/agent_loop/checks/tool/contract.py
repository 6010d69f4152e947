"""Checks of the contract of `BaseTool`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from agent_loop.checks.tool.checked_tool import END_S, CallResult, CheckedTool, require_same
from agent_loop.checks.tool.edge_arguments import edge_arguments
from agent_loop.errors import ToolError
from agent_loop.runtime.concurrency import run_together
from agent_loop.runtime.describe import describe_value
from agent_loop.runtime.incidents import IncidentCollector
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.threads import run_in_thread
from agent_loop.testing.blocking import require_no_blocking
from agent_loop.testing.conformance import CheckFailed, CheckSkipped, CheckSuite, require
from agent_loop.testing.leaks import count_resources, find_leak, require_forgotten
from agent_loop.tools.base import check_declarations
from agent_loop.tools.schema import check_arguments, check_tool_schema

TOOL_CHECKS = CheckSuite[CheckedTool]()
check = TOOL_CHECKS.check
NUM_CONCURRENT = 16
NUM_ROUNDS = 3
CANCEL_AFTER = (1, 2, 3, 4, 5, 6, 8, 12, 20)
"""Iterations of the event loop after which a call is cancelled, one after the other."""


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
