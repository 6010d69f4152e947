"""Conformance checks of what every trajectory opens and closes: tools and interactions."""

from __future__ import annotations

import asyncio
import copy
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, cast

from agent_loop.errors import ConfigError, InteractionBug, ToolError
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.session import read_reply, read_score
from agent_loop.runtime.concurrency import run_together
from agent_loop.runtime.describe import describe_error, describe_value, one_line
from agent_loop.runtime.incidents import IncidentCollector
from agent_loop.runtime.instances import OnReplay
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
from agent_loop.tools.results import read_result, read_reward
from agent_loop.tools.schema import check_arguments, check_tool_schema
from agent_loop.types import Message

END_S = 2.0
"""Seconds in which a cancelled turn must end."""
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
    name = f"tool {tool.name!r}"
    return await TOOL_CHECKS.run(subject, name=name, timeout_s=timeout_s, on_result=on_result)


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
    kwargs = {key: value for key, value in (interaction_kwargs or {}).items() if key != "name"}
    subject = CheckedInteraction(interaction, answers, kwargs, prompt)
    name = f"interaction {interaction.name!r}"
    return await INTERACTION_CHECKS.run(subject, name=name, timeout_s=timeout_s, on_result=on_result)


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Comparable part of what a call or a model turn returned."""

    text: str
    reward: float | None = None
    is_over: bool = False
    is_error: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)

    def __str__(self) -> str:
        text = f"{'error ' if self.is_error else ''}{self.text!r}, reward {self.reward}"
        return one_line(text, max_length=120)


@dataclass(frozen=True, eq=False)
class Checked(ABC):
    """Object under check that serves all trajectories, and the turns of each trajectory that the checks play."""

    owner: Any
    turns: Sequence[Any]
    _numbers: count[int] = field(default_factory=count, init=False)

    @abstractmethod
    async def open(self, instance_id: str) -> Any:
        """Open a trajectory."""

    @abstractmethod
    def play(self, instance_id: str, turns: Sequence[Any]) -> AsyncGenerator[TurnResult]:
        """Play turns of a trajectory, and yield the result of each."""

    @abstractmethod
    async def play_unusual(self, instance_id: str) -> str:
        """Play turns that the contract allows and that are easily forgotten."""

    @abstractmethod
    async def score(self, instance_id: str) -> float | None:
        """Return the score of a trajectory."""

    @abstractmethod
    async def close(self, instance_id: str) -> None:
        """Close a trajectory."""

    @property
    def on_replay(self) -> OnReplay:
        return OnReplay(self.owner.on_replay)

    def new_id(self) -> str:
        """Return the id of a new trajectory."""
        return f"check{next(self._numbers)}-0"

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[str]:
        """Open a trajectory, yield its id, and close it at the end."""
        instance_id = self.new_id()
        try:
            await self.open(instance_id)
            yield instance_id
        finally:
            await self.close(instance_id)

    async def results(self, instance_id: str, turns: Sequence[Any] | None = None) -> list[TurnResult]:
        """Play turns of an open trajectory and return their results."""
        return [result async for result in self.play(instance_id, self.turns if turns is None else turns)]

    async def trajectory(self, turns: Sequence[Any] | None = None) -> list[TurnResult]:
        """Play turns in a new trajectory and return their results."""
        async with self.opened() as instance_id:
            return await self.results(instance_id, turns)

    async def require_reproducible(self) -> None:
        """Skip the check if the same turns have other results in another trajectory."""
        if await self.trajectory() != await self.trajectory():
            raise CheckSkipped("the same turns return different results each time")


@dataclass(frozen=True, eq=False)
class CheckedTool(Checked):
    """Tool under check. A turn is the arguments of a call."""

    create_kwargs: Mapping[str, Any]
    execute_kwargs: Mapping[str, Any]

    async def open(self, instance_id: str) -> None:
        await _bounded(partial(self.owner.create, instance_id, **self.create_kwargs))

    async def play(self, instance_id: str, turns: Sequence[Any]) -> AsyncGenerator[TurnResult]:
        for arguments in turns:
            yield await self.call(instance_id, arguments)

    async def call(self, instance_id: str, arguments: Mapping[str, Any]) -> TurnResult:
        """Call the tool. A `ToolError` is a result."""
        given = copy.deepcopy(dict(arguments))
        try:
            returned = await _bounded(partial(self.owner.execute, instance_id, given, **self.execute_kwargs))
            result = read_result(returned, name=self.owner.name)
        except ToolError as error:
            return TurnResult(str(error), is_error=True)
        except Exception as error:
            what = one_line(json.dumps(arguments), max_length=120)
            raise CheckFailed(f"called with {what}, it raised {describe_error(error)}") from error
        response = result.response
        return TurnResult(response.text or "", result.reward, response.ends_episode, extra=result.extra)

    async def play_unusual(self, instance_id: str) -> str:
        edges = edge_arguments(self.owner.tool_schema, self.turns[0])
        results = await self.results(instance_id, edges)
        return f"{len(results)} calls, {sum(result.is_error for result in results)} of them failed"

    async def score(self, instance_id: str) -> float | None:
        reward = await _bounded(partial(self.owner.calc_reward, instance_id))
        return None if reward is None else read_reward(reward, where="calc_reward")

    async def close(self, instance_id: str) -> None:
        await _bounded(partial(self.owner.release, instance_id))


@dataclass(frozen=True, eq=False)
class CheckedInteraction(Checked):
    """Interaction under check. A turn is a message of the model."""

    kwargs: Mapping[str, Any]
    """A row's `interaction_kwargs`, without `name`."""
    prompt: Sequence[Message]

    async def open(self, instance_id: str) -> Any:
        return await _bounded(
            partial(self.owner.start_interaction, instance_id, **copy.deepcopy(dict(self.kwargs)))
        )

    async def reply(self, instance_id: str, messages: Sequence[Message]) -> TurnResult:
        """Return the reply to a conversation, which must stay unchanged."""
        given = copy.deepcopy([*self.prompt, *messages])
        before, kwargs = copy.deepcopy(given), copy.deepcopy(dict(self.kwargs))
        returned = await _bounded(partial(self.owner.generate_response, instance_id, given, **kwargs))
        require(given == before, f"generate_response changed the messages to {describe_value(given)}")
        try:
            reply = read_reply(returned, where="generate_response")
        except InteractionBug as error:
            raise CheckFailed(str(error)) from error
        return TurnResult(reply.content, reply.score, reply.is_over, extra=reply.extra)

    async def play(self, instance_id: str, turns: Sequence[Any]) -> AsyncGenerator[TurnResult]:
        messages: list[Message] = []
        for answer in turns:
            messages.append({"role": "assistant", "content": answer})
            reply = await self.reply(instance_id, messages)
            yield reply
            if reply.is_over:
                return
            messages.append({"role": "user", "content": reply.text})

    async def play_unusual(self, instance_id: str) -> str:
        await self.reply(instance_id, [{"role": "assistant", "content": ""}])
        called: list[Message] = [
            {"role": "assistant", "content": "", "tool_calls": [LOOK]},
            {"role": "tool", "name": "look", "content": "nothing"},
        ]
        await self.reply(instance_id, [*called, {"role": "assistant", "content": self.turns[0]}])
        return "an empty message, and a conversation with tool calls"

    async def score(self, instance_id: str) -> float | None:
        score = await _bounded(partial(self.owner.calculate_score, instance_id))
        return None if score is None else read_score(score, where="calculate_score")

    async def close(self, instance_id: str) -> None:
        await _bounded(partial(self.owner.finalize_interaction, instance_id))


async def _bounded(function: Callable[[], Awaitable[Any]]) -> Any:
    """Await a method of user code. `SystemExit` becomes RuntimeError, and a method that ignores a cancellation is
    abandoned."""
    return await run_bounded(function, timeout_s=None, grace_s=END_S)


TOOL_CHECKS = CheckSuite[CheckedTool]()
INTERACTION_CHECKS = CheckSuite[CheckedInteraction]()
CHECKS = CheckSuite[Checked]()
"""Checks of both."""


@TOOL_CHECKS.check("the schema is valid, and the calls match it")
async def _schema(subject: CheckedTool) -> None:
    check_tool_schema(subject.owner.tool_schema, where="its schema")
    for arguments in subject.turns:
        fault = check_arguments(subject.owner.tool_schema, arguments)
        require(fault is None, f"the call with {describe_value(arguments)} does not match it: {fault}")


@TOOL_CHECKS.check("on_replay and retries are compatible")
async def _declarations(subject: CheckedTool) -> str:
    check_declarations(subject.owner)
    return f"on_replay={subject.on_replay}, retries={subject.owner.retries}"


@TOOL_CHECKS.check("concurrent calls of one trajectory all get responses")
async def _parallel(subject: CheckedTool) -> None:
    async with subject.opened() as instance_id:
        await run_together(subject.call(instance_id, arguments) for arguments in [*subject.turns] * 3)


@INTERACTION_CHECKS.check("the opening message is text")
async def _opening(subject: CheckedInteraction) -> str:
    if not subject.owner.opens_conversation:
        raise CheckSkipped("it does not open the conversation")
    instance_id = subject.new_id()
    try:
        opening: Any = await subject.open(instance_id)
    finally:
        await subject.close(instance_id)
    described = describe_value(opening)
    require(opening is None or isinstance(opening, str), f"start_interaction returned {described}")
    return described


@CHECKS.check("every turn gets a valid reply")
async def _replies(subject: Checked) -> str:
    results = await subject.trajectory()
    is_refused = all(result.is_error for result in results)
    require(not is_refused, f"every call failed, as in {results[0]}; give a call that succeeds")
    return "; ".join(map(str, results[:2]))


@CHECKS.check("the extra data of a reply can be written as JSON")
async def _extra(subject: Checked) -> None:
    with IncidentCollector("check") as collector:
        results = await subject.trajectory()
    for incident in collector.incidents:
        raise CheckFailed(f"it cannot be written as JSON: {incident.detail}")
    for result in results:
        try:
            json.dumps(dict(result.extra))
        except (TypeError, ValueError) as error:
            raise CheckFailed(f"{describe_value(result.extra)} cannot be written as JSON: {error}") from error


@CHECKS.check("the score of a trajectory is a number or None")
async def _score(subject: Checked) -> str:
    async with subject.opened() as instance_id:
        await subject.results(instance_id)
        score = await subject.score(instance_id)
    return "None" if score is None else f"{score:g}"


@CHECKS.check("a trajectory may end before its first turn")
async def _unused(subject: Checked) -> None:
    async with subject.opened() as instance_id:
        await subject.score(instance_id)


@CHECKS.check("unusual turns get a reply")
async def _unusual(subject: Checked) -> str:
    async with subject.opened() as instance_id:
        return await subject.play_unusual(instance_id)


@CHECKS.check("concurrent trajectories do not share state")
async def _separate(subject: Checked) -> None:
    turns, others = list(subject.turns), list(reversed(subject.turns))
    async with subject.opened() as one:
        alone, score_alone = await subject.results(one, turns), await subject.score(one)
    async with subject.opened() as one, subject.opened() as two:
        played, beside = subject.play(one, turns), subject.play(two, others)
        together: list[TurnResult] = []
        for _ in turns:
            together += [result for result in [await anext(played, None)] if result is not None]
            await anext(beside, None)
        score = await subject.score(one)
    await subject.require_reproducible()
    _require_same(together, alone, "beside another trajectory")
    require(score == score_alone, f"beside another trajectory, its score is {score}, not {score_alone}")


@CHECKS.check("repeated turns behave as on_replay declares")
async def _replay(subject: Checked) -> str:
    declared = f"it declares on_replay={subject.on_replay}"
    if subject.on_replay is OnReplay.RERUN:
        first = await subject.trajectory()
        _require_same(await subject.trajectory(), first, f"{declared}, but when the turns are repeated")
        return "the same turns restore the same state"
    if subject.on_replay is not OnReplay.RECORDED or isinstance(subject, CheckedInteraction):
        raise CheckSkipped(declared)
    await subject.require_reproducible()
    alone = [(await subject.trajectory([turn]))[0] for turn in subject.turns]
    twice = await subject.trajectory([*subject.turns, *subject.turns])
    _require_same(twice, [*alone, *alone], f"{declared}, but after other turns")
    return "results do not depend on earlier turns"


@CHECKS.check("it does not block the event loop")
async def _blocking(subject: Checked) -> str:
    async with subject.opened() as instance_id:

        async def work() -> None:
            await subject.results(instance_id, subject.turns[:1])
            await subject.score(instance_id)

        return await require_no_blocking(work)


@CHECKS.check("a closed trajectory leaves nothing behind")
async def _forgotten(subject: Checked) -> None:
    async with subject.opened() as instance_id:
        await subject.results(instance_id, subject.turns[:1])
    require_forgotten(instance_id, subject.owner, after="it was closed")
    held = count_resources()
    for _ in range(NUM_ROUNDS):
        await subject.trajectory(subject.turns[:1])
    leaked = await find_leak(NUM_ROUNDS, since=held)
    require(leaked is None, f"each trajectory leaks one {leaked}")


@CHECKS.check("a trajectory whose start failed can be closed")
async def _never_opened(subject: Checked) -> None:
    await subject.close(subject.new_id())


@CHECKS.check("a trajectory whose start was cancelled can be closed")
async def _cancelled_start(subject: Checked) -> None:
    for num_iterations in CANCEL_AFTER:
        instance_id = subject.new_id()
        was_done = await _run_and_cancel(subject.open(instance_id), num_iterations=num_iterations)
        await subject.close(instance_id)
        require_forgotten(instance_id, subject.owner, after="it was closed")
        if was_done:
            break


@CHECKS.check("a cancelled turn ends quickly and does not affect later trajectories")
async def _cancelled_turn(subject: Checked) -> None:
    for num_iterations in CANCEL_AFTER:
        async with subject.opened() as instance_id:
            turn = subject.results(instance_id, subject.turns[:1])
            was_done = await _run_and_cancel(turn, num_iterations=num_iterations)
        await subject.trajectory()
        if was_done:
            break


TOOL_CHECKS.checks += CHECKS.checks
INTERACTION_CHECKS.checks += CHECKS.checks


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
