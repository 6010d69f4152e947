"""The sentences of the contract."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias

from agent_loop.errors import ToolError
from agent_loop.runtime.boundary import OnReplay, describe_value
from agent_loop.runtime.concurrency import run_together
from agent_loop.runtime.row_notes import RowNotes
from agent_loop.runtime.threads import run_in_thread
from agent_loop.testing.checks import CheckFailed, CheckSkipped, place_held, require, require_no_blocking
from agent_loop.tools.base import check_declarations
from agent_loop.tools.check.edges import edge_arguments
from agent_loop.tools.check.leaks import count_held, grown_by
from agent_loop.tools.check.subject import END_S, Subject, require_same
from agent_loop.tools.schema import check_arguments, check_tool_schema

CheckFunction: TypeAlias = Callable[[Subject], Coroutine[Any, Any, str | None]]
CHECKS: dict[str, CheckFunction] = {}
NUM_AT_ONCE = 16
NUM_ROUNDS = 3
CANCELLED_AFTER = (1, 2, 3, 4, 5, 6, 8, 12, 20)
"""Turns of the event loop: so many places of a call are tried."""


def check(name: str) -> Callable[[CheckFunction], CheckFunction]:
    """Adds a function to the checks."""

    def add(function: CheckFunction) -> CheckFunction:
        CHECKS[name] = function
        return function

    return add


@check("its schema is one of a tool, and the calls fit it")
async def _schema(subject: Subject) -> None:
    check_tool_schema(subject.tool.tool_schema, where="its schema")
    for arguments in subject.calls:
        fault = check_arguments(subject.tool.tool_schema, arguments)
        require(fault is None, f"the call with {describe_value(arguments)} does not fit: {fault}")


@check("what it declares of its calls can be kept")
async def _declarations(subject: Subject) -> str:
    check_declarations(subject.tool)
    return f"on_replay={subject.on_replay}, retries={subject.tool.retries}"


@check("a call is answered with words, a reward or none, and what to record")
async def _answers(subject: Subject) -> str:
    answers = await subject.conversation()
    refused = [answer for answer in answers if answer.is_error]
    require(len(refused) < len(answers), f"every call was refused, as in {answers[0]}; give one that works")
    return "; ".join(map(str, answers[:2]))


@check("what a call records can be written to a file")
async def _extra(subject: Subject) -> None:
    async with subject.created() as instance_id:
        for arguments in subject.calls:
            with suppress(ToolError), RowNotes("check") as notes:
                extra = (await subject.result(instance_id, arguments)).extra
                for incident in notes.incidents:
                    raise CheckFailed(f"JSON has no form for it: {incident.detail}")
                try:
                    json.dumps(dict(extra))
                except (TypeError, ValueError) as error:
                    raise CheckFailed(f"JSON has no form for {describe_value(extra)}: {error}") from error


@check("the verdict on a trajectory is a number, or None")
async def _verdict(subject: Subject) -> str:
    async with subject.created() as instance_id:
        for arguments in subject.calls:
            await subject.answer(instance_id, arguments)
        verdict = await subject.verdict(instance_id)
    return "None" if verdict is None else f"{verdict:g}"


@check("a trajectory may end before its first call")
async def _unused(subject: Subject) -> None:
    async with subject.created() as instance_id:
        await subject.verdict(instance_id)


@check("arguments at the edge of its schema are answered")
async def _edges(subject: Subject) -> str:
    edges = edge_arguments(subject.tool.tool_schema, subject.calls[0])
    async with subject.created() as instance_id:
        answers = [await subject.answer(instance_id, arguments) for arguments in edges]
    return f"{len(answers)} calls, {sum(answer.is_error for answer in answers)} refused"


@check("trajectories that run at once are told apart")
async def _apart(subject: Subject) -> None:
    if not await subject.is_reproducible():
        raise CheckSkipped("the same calls are answered differently each time")
    calls, others = list(subject.calls), list(reversed(subject.calls))
    async with subject.created() as one:
        alone = [await subject.answer(one, arguments) for arguments in calls]
        verdict_alone = await subject.verdict(one)
    async with subject.created() as one, subject.created() as two:
        together = [
            (await subject.answer(one, mine), await subject.answer(two, its))
            for mine, its in zip(calls, others, strict=True)
        ]
        verdict = await subject.verdict(one)
    require_same([mine for mine, _ in together], alone, "beside another trajectory")
    require(
        verdict == verdict_alone, f"beside another trajectory, its verdict is {verdict}, not {verdict_alone}"
    )


@check("many trajectories at once are all answered")
async def _many(subject: Subject) -> None:
    is_reproducible = await subject.is_reproducible()
    alone = await subject.conversation()
    for answers in await run_together(subject.conversation() for _ in range(NUM_AT_ONCE)):
        if is_reproducible:
            require_same(answers, alone, f"beside {NUM_AT_ONCE - 1} other trajectories")


@check("several calls of one trajectory at once are all answered")
async def _parallel(subject: Subject) -> None:
    async with subject.created() as instance_id:
        await run_together(subject.answer(instance_id, arguments) for arguments in [*subject.calls] * 3)


@check("what it says of running calls twice is true")
async def _replay(subject: Subject) -> str:
    if subject.on_replay not in (OnReplay.RECORDED, OnReplay.RERUN):
        raise CheckSkipped(f"it declares on_replay={subject.on_replay}")
    if not await subject.is_reproducible():
        if subject.on_replay is OnReplay.RERUN:
            raise CheckFailed("it declares on_replay=rerun, but the same calls are answered differently")
        raise CheckSkipped("the same calls are answered differently each time")
    if subject.on_replay is OnReplay.RERUN:
        return "the same calls bring a new instance to where the old one was"
    alone = [(await subject.conversation([arguments]))[0] for arguments in subject.calls]
    twice = await subject.conversation([*subject.calls, *subject.calls])
    require_same(twice, [*alone, *alone], "it declares on_replay=recorded, but after other calls")
    return "an answer does not depend on the calls before it"


@check("others go on while it works")
async def _blocking(subject: Subject) -> str:
    async def work() -> None:
        async with subject.created() as instance_id:
            await subject.answer(instance_id, subject.calls[0])
            await subject.verdict(instance_id)

    return await require_no_blocking(work)


@check("a trajectory that is over leaves nothing behind")
async def _forgotten(subject: Subject) -> None:
    before = asyncio.all_tasks()
    async with subject.created() as instance_id:
        await subject.answer(instance_id, subject.calls[0])
    place = place_held(instance_id, subject.tool)
    require(place is None, f"its id is still in self.{place} after release")
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - before
    require(not left, f"tasks still run after release, as {next(iter(left), None)}")
    held = count_held()
    for _ in range(NUM_ROUNDS):
        await subject.conversation(subject.calls[:1])
    grown = await grown_by(NUM_ROUNDS, since=held)
    require(grown is None, f"each trajectory leaves one more {grown}")


@check("a trajectory whose create failed can be released")
async def _never_created(subject: Subject) -> None:
    await subject.release(subject.new_id())


@check("a trajectory that is cancelled while it is created can be released")
async def _cancelled_create(subject: Subject) -> None:
    for num_turns in CANCELLED_AFTER:
        instance_id = subject.new_id()
        was_over = await _cancelled(subject.create(instance_id), num_turns=num_turns)
        await subject.release(instance_id)
        place = place_held(instance_id, subject.tool)
        require(place is None, f"its id is still in self.{place} after release")
        if was_over:
            break


@check("a call that is cancelled ends soon, and others go on")
async def _cancelled_call(subject: Subject) -> None:
    for num_turns in CANCELLED_AFTER:
        async with subject.created() as instance_id:
            call = subject.answer(instance_id, subject.calls[0])
            was_over = await _cancelled(call, num_turns=num_turns)
        await subject.conversation()
        if was_over:
            break


@check("it works on another event loop too")
async def _other_loop(subject: Subject) -> None:
    await subject.conversation()
    await run_in_thread(lambda: asyncio.run(subject.conversation()))


async def _cancelled(call: Coroutine[Any, Any, object], *, num_turns: int) -> bool:
    """Begins something and cancels it while it runs; says whether it was over before."""
    clock = asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as group:
        task = group.create_task(call)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        was_over = task.done()
        task.cancel()
        started = clock()
        await asyncio.wait({task})
    require(clock() - started < END_S, f"it still ran {END_S:g} s after it was cancelled")
    return was_over
