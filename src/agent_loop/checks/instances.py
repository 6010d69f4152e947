"""Conformance checks of tools and interactions, which play them in the sessions that rollouts use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import uuid4

from agent_loop.config import MultiTurnConfig
from agent_loop.environments.live import LiveEnvironment
from agent_loop.errors import ConfigError
from agent_loop.interactions.base import BaseInteraction
from agent_loop.runtime.concurrency import run_together
from agent_loop.runtime.describe import describe_value, one_line
from agent_loop.runtime.incidents import IncidentCollector
from agent_loop.runtime.instances import OnReplay
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
from agent_loop.tools.base import BaseTool
from agent_loop.tools.schema import check_arguments, check_tool_schema
from agent_loop.tools.session import ToolSession, ToolSessionConfig
from agent_loop.trajectory import Incident
from agent_loop.types import Message, ToolCall

END_S = 2.0
"""Seconds in which a cancelled turn must end."""
NO_LIMIT_S = 1e6
"""Time limit of a session. The checks have their own."""
NUM_ROUNDS = 3
CANCEL_AFTER = (1, 2, 3, 5, 8, 20)
"""Iterations of the event loop after which a turn is cancelled, one after the other."""
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
PROMPT: Sequence[Message] = ({"role": "user", "content": "Begin."},)
ANSWERS = ("I do not know.", "#### 42", "Goodbye.")
LOOK: Message = {"type": "function", "id": "1", "function": {"name": "look", "arguments": {}}}
AFTER_TOOLS: Sequence[Message] = (
    {"role": "assistant", "content": "", "tool_calls": [LOOK]},
    {"role": "tool", "name": "look", "content": "nothing"},
    {"role": "assistant", "content": "There is nothing."},
)


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
    name, limits = tool.name, ToolSessionConfig(timeout_s=NO_LIMIT_S, close_timeout_s=NO_LIMIT_S)
    kwargs = {name: {"create_kwargs": create_kwargs, "execute_kwargs": execute_kwargs}}

    def start(trajectory: str) -> PlayedTrajectory:
        session = ToolSession({name: tool}, config=limits, tools_kwargs=kwargs, trajectory=trajectory)

        async def call(arguments: Mapping[str, Any]) -> TurnResult:
            result = await session.execute(ToolCall(name, dict(arguments)))
            response = result.response
            is_error = result.incident is not None
            return TurnResult(response.text or "", result.reward, response.ends_episode, is_error)

        async def score() -> float | None:
            return (await session.calc_rewards()).get(name)

        return PlayedTrajectory(trajectory, lambda: session.open(name), call, score, session.close)

    subject = Checked(
        tool,
        turns=calls,
        unusual=lambda: edge_arguments(tool.tool_schema, calls[0]),
        start=start,
        release=tool.release,
    )
    return await TOOL_CHECKS.run(subject, name=f"tool {name!r}", timeout_s=timeout_s, on_result=on_result)


async def check_interaction(
    interaction: BaseInteraction,
    *,
    interaction_kwargs: Mapping[str, Any] | None = None,
    prompt: Sequence[Message] = PROMPT,
    answers: Sequence[str] = ANSWERS,
    timeout_s: float = 60.0,
    on_result: OnResult | None = None,
) -> CheckReport:
    """Check that an interaction follows the contract of `BaseInteraction`.

    Args:
        interaction_kwargs: The `interaction_kwargs` of a row.
        prompt: The messages of a row.
        answers: The model's messages, one per turn. Give one of each kind that the interaction distinguishes.
        timeout_s: Time limit of each check.
        on_result: Called with each result as soon as it is known.

    Raises:
        ConfigError: `answers` is empty.
    """
    if not answers:
        raise ConfigError("check_interaction needs at least one answer of the model")
    limits = MultiTurnConfig(interaction_timeout_s=NO_LIMIT_S, close_timeout_s=NO_LIMIT_S)

    def start(trajectory: str) -> PlayedTrajectory:
        row = {"interaction_kwargs": interaction_kwargs or {}, "trajectory": trajectory}
        live = LiveEnvironment.of_interaction(interaction, row=row, limits=limits)
        messages = list(prompt)

        async def reply(turn: Sequence[Message]) -> TurnResult:
            messages.extend(turn)
            returned = await live.reply(messages)
            messages.append({"role": "user", "content": returned.content})
            return TurnResult(returned.content, returned.score, returned.is_over)

        async def score() -> float | None:
            given = await live.reward(messages)
            return None if given is None else given.reward

        return PlayedTrajectory(trajectory, live.open, reply, score, live.close)

    subject = Checked(
        interaction,
        turns=[[{"role": "assistant", "content": answer}] for answer in answers],
        unusual=lambda: [[{"role": "assistant", "content": ""}], AFTER_TOOLS],
        start=start,
        release=interaction.finalize_interaction,
    )
    name = f"interaction {interaction.name!r}"
    return await INTERACTION_CHECKS.run(subject, name=name, timeout_s=timeout_s, on_result=on_result)


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Outcome of a call, or of a turn without one, for the model and the trainer."""

    text: str
    reward: float | None = None
    is_over: bool = False
    is_error: bool = False

    def __str__(self) -> str:
        text = f"{'error ' if self.is_error else ''}{self.text!r}, reward {self.reward}"
        return one_line(text, max_length=120)


@dataclass(frozen=True, slots=True)
class PlayedTrajectory:
    """Trajectory of the object under check: the session of a tool or of an interaction, and what it returned."""

    id: str
    open: Callable[[], Coroutine[Any, Any, object]]
    turn: Callable[[Any], Coroutine[Any, Any, TurnResult]]
    score: Callable[[], Awaitable[float | None]]
    close: Callable[[], Awaitable[Sequence[Incident]]]
    results: list[TurnResult] = field(default_factory=list[TurnResult])

    async def play(self, turns: Sequence[Any]) -> list[TurnResult]:
        """Play turns until the trajectory is over, and return the results of all turns so far."""
        for turn in turns:
            if not self.results or not self.results[-1].is_over:
                self.results.append(await self.turn(turn))
        return self.results


@dataclass(frozen=True, slots=True)
class Checked:
    """Tool or interaction under check, which serves all trajectories, and the turns that the checks play."""

    owner: BaseTool | BaseInteraction
    turns: Sequence[Any]
    """Arguments of calls to a tool, or messages that an interaction replies to."""
    unusual: Callable[[], Sequence[Any]]
    """Turns that the contract allows and that are easily forgotten."""
    start: Callable[[str], PlayedTrajectory]
    release: Callable[[str], Awaitable[object]]

    @asynccontextmanager
    async def trajectory(self) -> AsyncGenerator[PlayedTrajectory]:
        """Open a new trajectory, and close it at the end."""
        trajectory = self.start(uuid4().hex)
        try:
            await trajectory.open()
            yield trajectory
        finally:
            incidents = await trajectory.close()
        require(not incidents, "; ".join(incident.detail for incident in incidents))

    async def results(self, turns: Sequence[Any] | None = None) -> list[TurnResult]:
        """Play turns in a new trajectory and return their results."""
        async with self.trajectory() as trajectory:
            return await trajectory.play(self.turns if turns is None else turns)

    async def require_reproducible(self) -> None:
        """Skip the check if the same turns have other results in another trajectory."""
        if await self.results() != await self.results():
            raise CheckSkipped("the same turns return different results each time")


INTERACTION_CHECKS = CheckSuite[Checked]()
_check = INTERACTION_CHECKS.check


@_check("every turn gets a valid reply")
async def _replies(subject: Checked) -> str:
    results = await subject.results()
    is_refused = all(result.is_error for result in results)
    require(not is_refused, f"every call failed, as in {results[0]}; give a call that succeeds")
    return "; ".join(map(str, results[:2]))


@_check("the extra data of a reply can be stored")
async def _extra(subject: Checked) -> None:
    with IncidentCollector("check") as collector:
        await subject.results()
    for incident in collector.incidents:
        raise CheckFailed(f"it cannot be stored: {incident.detail}")


@_check("the score of a trajectory is a number or None")
async def _score(subject: Checked) -> str:
    async with subject.trajectory() as trajectory:
        await trajectory.play(subject.turns)
        score = await trajectory.score()
    return "None" if score is None else f"{score:g}"


@_check("a trajectory may end before its first turn")
async def _unused(subject: Checked) -> None:
    async with subject.trajectory() as trajectory:
        await trajectory.score()


@_check("unusual turns get a reply")
async def _unusual(subject: Checked) -> str:
    async with subject.trajectory() as trajectory:
        results = [await trajectory.turn(turn) for turn in subject.unusual()]
    return f"{len(results)} turns, {sum(result.is_error for result in results)} of them failed"


@_check("concurrent trajectories do not share state")
async def _separate(subject: Checked) -> None:
    async with subject.trajectory() as one:
        alone, score_alone = await one.play(subject.turns), await one.score()
    async with subject.trajectory() as one, subject.trajectory() as two:
        for turn, other in zip(subject.turns, reversed(subject.turns), strict=True):
            await one.play([turn])
            await two.play([other])
        score = await one.score()
    await subject.require_reproducible()
    _require_same(one.results, alone, "beside another trajectory")
    require(score == score_alone, f"beside another trajectory, its score is {score}, not {score_alone}")


@_check("repeated turns behave as on_replay declares")
async def _replay(subject: Checked) -> str:
    on_replay = OnReplay(subject.owner.on_replay)
    declared = f"it declares on_replay={on_replay}"
    if on_replay is OnReplay.RERUN:
        first = await subject.results()
        _require_same(await subject.results(), first, f"{declared}, but when the turns are repeated")
        return "the same turns restore the same state"
    if on_replay is not OnReplay.RECORDED or isinstance(subject.owner, BaseInteraction):
        raise CheckSkipped(declared)
    await subject.require_reproducible()
    alone = [result for turn in subject.turns for result in await subject.results([turn])]
    twice = await subject.results([*subject.turns, *subject.turns])
    _require_same(twice, [*alone, *alone], f"{declared}, but after other turns")
    return "results do not depend on earlier turns"


@_check("it does not block the event loop")
async def _blocking(subject: Checked) -> str:
    async with subject.trajectory() as trajectory:

        async def work() -> None:
            await trajectory.turn(subject.turns[0])
            await trajectory.score()

        return await require_no_blocking(work)


@_check("a closed trajectory leaves nothing behind")
async def _forgotten(subject: Checked) -> None:
    async with subject.trajectory() as trajectory:
        await trajectory.play(subject.turns[:1])
    require_forgotten(trajectory.id, subject.owner, after="it was closed")
    held = count_resources()
    for _ in range(NUM_ROUNDS):
        await subject.results(subject.turns[:1])
    leaked = await find_leak(NUM_ROUNDS, since=held)
    require(leaked is None, f"each trajectory leaks one {leaked}")


@_check("a trajectory whose start failed can be closed")
async def _never_opened(subject: Checked) -> None:
    await subject.release(uuid4().hex)


@_check("a trajectory whose start was cancelled can be closed")
async def _cancelled_start(subject: Checked) -> None:
    for num_iterations in CANCEL_AFTER:
        trajectory = subject.start(uuid4().hex)
        was_done = await _run_and_cancel(trajectory.open(), num_iterations=num_iterations)
        incidents = await trajectory.close()
        require(not incidents, "; ".join(incident.detail for incident in incidents))
        require_forgotten(trajectory.id, subject.owner, after="it was closed")
        if was_done:
            break


@_check("a cancelled turn ends quickly and does not affect later trajectories")
async def _cancelled_turn(subject: Checked) -> None:
    for num_iterations in CANCEL_AFTER:
        async with subject.trajectory() as trajectory:
            was_done = await _run_and_cancel(trajectory.turn(subject.turns[0]), num_iterations=num_iterations)
        await subject.results()
        if was_done:
            break


TOOL_CHECKS = CheckSuite(INTERACTION_CHECKS.checks)


@TOOL_CHECKS.check("the schema is valid, and the calls match it")
async def _schema(subject: Checked) -> None:
    schema = cast(BaseTool, subject.owner).tool_schema
    check_tool_schema(schema, where="its schema")
    for arguments in subject.turns:
        fault = check_arguments(schema, arguments)
        require(fault is None, f"the call with {describe_value(arguments)} does not match it: {fault}")


@TOOL_CHECKS.check("concurrent calls of one trajectory all get responses")
async def _parallel(subject: Checked) -> None:
    async with subject.trajectory() as trajectory:
        await run_together(trajectory.turn(arguments) for arguments in [*subject.turns] * 3)


def _require_same(got: Sequence[TurnResult], wanted: Sequence[TurnResult], what: str) -> None:
    for number, (one, other) in enumerate(zip(got, wanted, strict=False), start=1):
        require(one == other, f"{what}, reply {number} is {one}, not {other}")
    require(len(got) == len(wanted), f"{what}, there are {len(got)} replies, not {len(wanted)}")


async def _run_and_cancel(turn: Coroutine[Any, Any, object], *, num_iterations: int) -> bool:
    """Start a turn and cancel it after iterations of the event loop. Return whether it was done before."""
    clock = asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as group:
        task = group.create_task(turn)
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
