"""User code that does everything wrong: its actions (`DEEDS`, `VALUES`), and the components that perform them."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from agent_loop.interactions.base import BaseInteraction
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.runtime.user_code import call_function
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.trajectory import AgentLoopOutput
from tests.helpers import small_tokenizer, text_reply, tool_call_reply, user
from tests.rollout.harness import Adder


class Released:
    """Events that release all hanging code at the end of a test."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.threads = threading.Event()

    def set(self) -> None:
        self.event.set()
        self.threads.set()


RELEASED: list[Released] = []
"""Events of the running test, at most one entry."""


# -- actions of user code ----------------------------------------------------------------------------------------------


class Panic(BaseException):
    """BaseException such as extension modules in other languages raise."""


async def hang() -> None:
    await asyncio.sleep(math.inf)


async def swallow() -> None:
    released = RELEASED[0].event
    while not released.is_set():
        with suppress(asyncio.CancelledError):
            await released.wait()


async def swallow_everything() -> None:
    released = RELEASED[0].event
    while not released.is_set():
        try:
            await asyncio.shield(asyncio.sleep(3600))
        except BaseException:
            await asyncio.sleep(0)


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


async def overflow_the_stack() -> None:
    await overflow_the_stack()


def raising(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def deed() -> None:
        await asyncio.sleep(0)
        raise error

    return deed


DEEDS: dict[str, Callable[[], Awaitable[None]]] = {
    "hangs": hang,
    "swallows": swallow,
    "swallows_everything": swallow_everything,
    "cancels_itself": cancel_itself,
    "recursion": overflow_the_stack,
    "raises": raising(ValueError("a bug")),
    "system_exit": raising(SystemExit(3)),
    "keyboard_interrupt": raising(KeyboardInterrupt()),
    "cancelled_error": raising(asyncio.CancelledError()),
    "stop_iteration": raising(StopIteration(1)),
    "stop_async_iteration": raising(StopAsyncIteration()),
}
ABANDONED = frozenset({"swallows", "swallows_everything"})


def _recursive() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["itself"] = [value]
    return value


def _deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


VALUES: dict[str, Callable[[], Any]] = {
    "recursive": _recursive,
    "deep": _deep,
    "tuple_keys": lambda: {(1, 2): 3, None: 4, 5: 6},
    "odd_keys": lambda: {frozenset(): 1, object(): 2},
    "huge_integer": lambda: 10**5000,
    "integer_of_80_bits": lambda: 2**80,
    "nan": lambda: math.nan,
    "infinite": lambda: -math.inf,
    "half_surrogate": lambda: "a\ud800b",
    "long_text": lambda: "x" * 2_000_000,
    "generator": lambda: (n for n in range(3)),
    "lock": threading.Lock,
    "array_of_objects": lambda: np.array([object(), None], dtype=object),
    "bytes": lambda: b"\xff\x00",
    "set": lambda: {1, 2},
}


# -- components that perform the actions -------------------------------------------------------------------------------


async def _maybe(deed: str | None) -> None:
    if deed is not None:
        await DEEDS[deed]()


def _extra(value: str | None) -> dict[Any, Any]:
    return {} if value is None else {"ok": 1, "odd": VALUES[value]()}


class HostileTool(Adder):
    """Tool that adds two numbers and misbehaves in the method that the row names."""

    has_verdict = True

    async def create(self, instance_id: str, *, deed: str | None = None, **kwargs: Any) -> None:
        await super().create(instance_id)
        await _maybe(deed)

    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        *,
        deed: str | None = None,
        value: str | None = None,
        returns: str | None = None,
        **kwargs: Any,
    ) -> Any:
        await _maybe(deed)
        response = ToolResponse(text=str(parameters["a"] + parameters["b"]))
        match returns:
            case None:
                return response, 0.5, _extra(value)
            case "nothing":
                return None
            case "garbage":
                return object()
            case "garbage_response":
                return object(), None, {}
            case "garbage_reward":
                return response, object(), {}
            case "nan_reward":
                return response, math.nan, {}
            case "huge_reward":
                return response, 1e308, {}
            case "long_text":
                return "x" * 3_000_000, None, {}
            case "mutates":
                parameters.clear()
                return response, None, {}
            case _:
                raise AssertionError(returns)

    async def calc_reward(self, instance_id: str, *, deed: str | None = None, **kwargs: Any) -> Any:
        await _maybe(deed)
        returns = kwargs.get("returns")
        return None if returns is None else VALUES[returns]()

    async def release(self, instance_id: str, *, deed: str | None = None, **kwargs: Any) -> None:
        await super().release(instance_id)
        await _maybe(deed)


class HostileInteraction(BaseInteraction):
    """Interaction that replies once and misbehaves in the method that the row names."""

    def __init__(self) -> None:
        super().__init__({"name": "hostile"})
        self._deeds: dict[str, Mapping[str, Any]] = {}

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str | None:
        self._deeds[instance_id] = kwargs
        await self._do("start", kwargs)
        return None

    async def generate_response(self, instance_id: str, messages: list[Any], **kwargs: Any) -> Any:
        await self._do("respond", kwargs)
        if kwargs.get("mutates"):
            for message in messages:
                message.clear()
            messages.clear()
        if kwargs.get("returns") == "garbage":
            return object()
        if kwargs.get("returns") == "garbage_parts":
            return object(), 3, object(), 5
        if kwargs.get("returns") == "short":
            return (True,)
        return True, "good bye", 0.25, _extra(kwargs.get("value"))

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> Any:
        await self._do("score", self._deeds[instance_id])
        returns = self._deeds[instance_id].get("verdict")
        return None if returns is None else VALUES[returns]()

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        await self._do("finalize", self._deeds.pop(instance_id, {}))

    async def _do(self, where: str, kwargs: Mapping[str, Any]) -> None:
        if kwargs.get("where") == where:
            await DEEDS[kwargs["deed"]]()


@register("hostile_loop")
class HostileLoop(AgentLoopBase):
    """Loop that samples one turn and then performs the action that the row names."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        deed, returns = row.get("deed"), row.get("returns")
        if row.get("mutates"):
            row["raw_prompt"].clear()
            return AgentLoopOutput(segments=())
        if row.get("bare"):
            return await self._bare(sampling_params, row)
        async with self.episode(row["raw_prompt"]) as episode:
            await episode.generate(sampling_params)
            if row.get("goes_on"):
                await self._go_on_although_cancelled(episode, sampling_params)
            await _maybe(deed)
        output = episode.output(reward_score=1.0)
        if "value" in row:
            return replace(output, extra_fields=_extra(row["value"]))
        match returns:
            case "nothing":
                return None
            case "empty":
                return []
            case "list_of_garbage":
                return [output, 5]
            case "garbage":
                return object()
            case "garbage_reward":
                return replace(output, reward_score=object())
            case "nan_reward":
                return replace(output, reward_score=math.nan)
            case "huge_reward":
                return replace(output, reward_score=1e308)
            case "text_reward":
                return replace(output, reward_score="x")
            case "garbage_messages":
                return replace(output, messages=[5])
            case "two":
                return [output, output]
            case _:
                return output

    async def _go_on_although_cancelled(self, episode: Any, sampling_params: Mapping[str, Any]) -> None:
        while not RELEASED[0].event.is_set():
            try:
                await asyncio.sleep(1)
                await self.server_manager.generate(
                    "again", prompt_ids=[1, 2], sampling_params=dict(sampling_params)
                )
            except BaseException:
                await asyncio.sleep(1)

    async def _bare(self, sampling_params: Mapping[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(row["raw_prompt"])
        completion = await self.server_manager.generate(
            f"bare {id(row)}", prompt_ids=prompt_ids, sampling_params=dict(sampling_params)
        )
        ids = list(completion.token_ids)
        arguments: dict[str, Any] = {
            "prompt_ids": prompt_ids,
            "response_ids": ids,
            "response_mask": [1] * len(ids),
            "response_logprobs": [-0.5] * len(ids),
        }
        arguments |= {
            "short_mask": lambda: {"response_mask": [1]},
            "nan_logprobs": lambda: {"response_logprobs": [math.nan] * len(ids)},
            "positive_logprobs": lambda: {"response_logprobs": [3.0] * len(ids)},
            "too_long": lambda: {
                "response_ids": [5] * 9000,
                "response_mask": [1] * 9000,
                "response_logprobs": None,
            },
            "negative_ids": lambda: {"response_ids": [-5] * len(ids)},
            "unknown_ids": lambda: {"response_ids": [10**6] * len(ids)},
        }[row["bare"]]()
        return AgentLoopOutput(reward_score=1.0, **arguments)


def script(request: ScriptedRequest) -> ScriptedReply:
    """Return a call of the tool if the prompt asks for it, and then an answer."""
    text = small_tokenizer().decode(request.prompt_ids.tolist())
    if "add" in text and request.turn == 0:
        return tool_call_reply("add", a=1, b=2)
    return text_reply(f"{len(request.prompt_ids) % 7}", latency_s=0.25)


async def async_reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> Any:
    """Return the reward of a harmless row. It depends only on the answer."""
    told = row.get("reward_does", {})
    if told.get("mutates"):
        for message in output.messages:
            message.clear()
        row["raw_prompt"].clear()
        row.clear()  # type: ignore[attr-defined]
        output.extra_fields.clear()  # type: ignore[attr-defined]
    await _maybe(told.get("deed"))
    if "in_thread" in told:
        return await call_function(in_threads()[told["in_thread"]])
    if "returns" in told:
        return VALUES[told["returns"]]()
    if "value" in told:
        return {"reward": 1.0, "odd": VALUES[told["value"]]()}
    return {"reward": len(output.response_ids) % 3 / 2, "length": len(output.response_ids)}


def in_threads() -> dict[str, Callable[[], Any]]:
    """Return the actions of functions that run in threads."""

    def raises(error: BaseException) -> None:
        raise error

    return {
        "hangs": RELEASED[0].threads.wait,
        "exits": partial(raises, SystemExit(4)),
        "interrupts": partial(raises, KeyboardInterrupt()),
        "generator_exit": partial(raises, GeneratorExit()),
        "stop_iteration": partial(raises, StopIteration(5)),
        "cancelled": partial(raises, asyncio.CancelledError()),
        "panics": partial(raises, Panic()),
        "returns_garbage": object,
    }


IN_THREADS = (
    *("hangs", "exits", "interrupts", "generator_exit", "stop_iteration", "cancelled", "panics"),
    "returns_garbage",
)


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Kind of hostile component, and the columns of the rows that use it."""

    name: str
    columns: Mapping[str, Any]
    text: str
    ends: Sequence[str]
    """Allowed ends of the row: stop reasons, with the type of the failure after `failed`."""
    num_abandoned: int = 0

    def row(self, number: int) -> dict[str, Any]:
        """Return one row of this kind."""
        return {**self.columns, "raw_prompt": user(f"{self.text} {number}"), "kind": self.name}


def kinds() -> list[Kind]:
    """Return all kinds."""
    return [
        *_tool_kinds(),
        *_interaction_kinds(),
        *_reward_kinds(),
        *_loop_kinds(),
        *_row_kinds(),
    ]


def _tool_kinds() -> list[Kind]:
    found: list[Kind] = []
    for deed in DEEDS:
        abandoned = int(deed in ABANDONED)
        slow = deed in ABANDONED | {"hangs"}
        for method in ("create", "execute"):
            ends = ["failed ToolBug"] if deed != "hangs" else ["answered"]
            columns = {"tools_kwargs": {"add": {f"{method}_kwargs": {"deed": deed}}}}
            found.append(Kind(f"tool {method} {deed}", columns, "add", ends, abandoned))
        columns = {"tools_kwargs": {"add": {"calc_reward_kwargs": {"deed": deed}}}}
        found.append(Kind(f"tool calc_reward {deed}", columns, "add", ["failed ToolBug"], abandoned))
        columns = {"tools_kwargs": {"add": {"release_kwargs": {"deed": deed}}}}
        found.append(Kind(f"tool release {deed}", columns, "add", ["answered"], abandoned if slow else 0))
    for value in VALUES:
        columns = {"tools_kwargs": {"add": {"execute_kwargs": {"value": value}}}}
        found.append(Kind(f"tool extra {value}", columns, "add", ["answered"]))
    for value in ("nan", "huge_integer", "infinite", "recursive", "array_of_objects"):
        columns = {"tools_kwargs": {"add": {"calc_reward_kwargs": {"returns": value}}}}
        found.append(Kind(f"tool verdict {value}", columns, "add", ["failed ToolBug"]))
    for returns in ("nothing", "garbage", "garbage_response", "garbage_reward", "nan_reward", "huge_reward"):
        columns = {"tools_kwargs": {"add": {"execute_kwargs": {"returns": returns}}}}
        found.append(Kind(f"tool returns {returns}", columns, "add", ["failed ToolBug"]))
    for returns in ("long_text", "mutates"):
        columns = {"tools_kwargs": {"add": {"execute_kwargs": {"returns": returns}}}}
        ends = ["answered", "response_length"]
        found.append(Kind(f"tool returns {returns}", columns, "add", ends))
    return found


def _interaction_kinds() -> list[Kind]:
    def kind(name: str, ends: Sequence[str], num_abandoned: int = 0, **kwargs: Any) -> Kind:
        columns = {"interaction_kwargs": {"name": "hostile", **kwargs}}
        return Kind(f"interaction {name}", columns, "hello", ends, num_abandoned)

    found: list[Kind] = []
    for deed in DEEDS:
        abandoned = int(deed in ABANDONED)
        for method in ("start", "respond", "score"):
            ends = ["failed InteractionBug"]
            found.append(kind(f"{method} {deed}", ends, abandoned, where=method, deed=deed))
        over = ["interaction_finished"]
        found.append(kind(f"finalize {deed}", over, abandoned, where="finalize", deed=deed))
    found += [kind(f"extra {value}", ["interaction_finished"], value=value) for value in VALUES]
    found += [
        kind(f"returns {returns}", ["failed InteractionBug"], returns=returns)
        for returns in ("garbage", "garbage_parts", "short")
    ]
    found.append(kind("mutates", ["interaction_finished"], mutates=True))
    for value in ("nan", "huge_integer", "deep"):
        found.append(kind(f"verdict {value}", ["failed InteractionBug"], verdict=value))
    return found


def _reward_kinds() -> list[Kind]:
    def kind(name: str, ends: Sequence[str], num_abandoned: int = 0, **does: Any) -> Kind:
        return Kind(f"reward {name}", {"reward_does": does}, "hello", ends, num_abandoned)

    failed = ["failed RewardError"]
    found = [kind(deed, failed, int(deed in ABANDONED), deed=deed) for deed in DEEDS]
    found += [kind(f"extra {value}", ["answered"], value=value) for value in VALUES]
    found += [
        kind(f"returns {value}", failed, returns=value)
        for value in ("nan", "infinite", "huge_integer", "deep", "long_text", "lock")
    ]
    found += [kind(f"thread {name}", failed, in_thread=name) for name in IN_THREADS]
    found.append(kind("mutates", ["answered"], mutates=True))
    return found


def _loop_kinds() -> list[Kind]:
    def kind(name: str, ends: Sequence[str], num_abandoned: int = 0, **columns: Any) -> Kind:
        return Kind(f"loop {name}", {"agent_name": "hostile_loop", **columns}, "hello", ends, num_abandoned)

    ends_of = {
        "hangs": ["deadline"],
        "swallows": ["deadline"],
        "swallows_everything": ["deadline"],
        "raises": ["failed ValueError"],
        "recursion": ["failed RecursionError"],
        "stop_async_iteration": ["failed StopAsyncIteration"],
    }
    found = [
        kind(deed, ends_of.get(deed, ["failed RuntimeError"]), int(deed in ABANDONED), deed=deed)
        for deed in DEEDS
    ]
    found += [kind(f"extra {value}", ["answered"], value=value) for value in VALUES]
    found += [
        kind(f"returns {returns}", ["failed EpisodeError"], returns=returns)
        for returns in ("nothing", "empty", "list_of_garbage", "nan_reward", "huge_reward", "text_reward")
    ]
    found.append(kind("returns garbage", ["failed EpisodeError"], returns="garbage"))
    found.append(kind("returns garbage_reward", ["failed EpisodeError"], returns="garbage_reward"))
    found.append(kind("returns garbage_messages", ["failed EpisodeError"], returns="garbage_messages"))
    found.append(kind("returns two", ["answered"], returns="two"))
    found.append(kind("goes on although it is cancelled", ["deadline"], 1, goes_on=True))
    found.append(kind("mutates its row", ["answered"], mutates=True))
    for bare in ("short_mask", "nan_logprobs", "positive_logprobs", "negative_ids", "unknown_ids"):
        found.append(kind(f"bare {bare}", ["failed EpisodeError"], bare=bare))
    found.append(kind("bare too_long", ["response_length"], bare="too_long"))
    return found


def _row_kinds() -> list[Kind]:
    return [Kind(f"row {value}", {"odd": VALUES[value]()}, "hello", ["answered"]) for value in VALUES]


def harmless_row(number: int) -> dict[str, Any]:
    """Return a row that does nothing wrong. A third of these rows use each component."""
    row: dict[str, Any] = {"raw_prompt": user(f"{'add' if number % 3 == 0 else 'hello'} {number}")}
    if number % 3 == 1:
        row["interaction_kwargs"] = {"name": "hostile"}
    return row


def hostile_tools() -> list[BaseTool]:
    """Return the tool of all rows."""
    return [HostileTool()]


def json_lines(text: str) -> list[dict[str, Any]]:
    """Parse JSON lines strictly: NaN and infinities are errors."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
