"""User code that misbehaves ends its own rows with a reason, leaks nothing, and does not change other rows."""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agent_loop.config import MultiTurnConfig
from agent_loop.interactions.base import BaseInteraction
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.batch import assemble
from agent_loop.rollout.jobs import Job
from agent_loop.runtime.isolated_task import num_abandoned
from agent_loop.runtime.user_code import call_function
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.testing import run_virtual
from agent_loop.tools.base import ToolResponse
from agent_loop.trajectory import AgentLoopOutput, IncidentKind, Trajectory
from agent_loop.types import Row
from tests.helpers import hermes_template, small_tokenizer, text_reply, tool_call_reply, user
from tests.rollout.harness import Adder, WorkerHarness

GROUP = 6
NUM_HARMLESS = 30
LONG_S = 4000.0
"""Time after which all released code has ended."""


class Released:
    """Events that release all hanging code at the end of a test."""

    now: Released

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.threads = threading.Event()
        Released.now = self

    def set(self) -> None:
        self.event.set()
        self.threads.set()


async def hang() -> None:
    await asyncio.sleep(math.inf)


async def swallow() -> None:
    released = Released.now.event
    while not released.is_set():
        with suppress(asyncio.CancelledError):
            await released.wait()


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


def raising(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def deed() -> None:
        await asyncio.sleep(0)
        raise error

    return deed


async def behave() -> None:
    pass


DEEDS: dict[str | None, Callable[[], Awaitable[None]]] = {
    None: behave,
    "hangs": hang,
    "swallows": swallow,
    "cancels_itself": cancel_itself,
    "raises": raising(ValueError("a bug")),
    "exits": raising(SystemExit(3)),
}


def misbehaving(cls: type[Any], *methods: str) -> Any:
    """Return a subclass whose methods do what the argument with their name says before they begin."""

    def method(name: str) -> Any:
        async def run(self: Any, instance_id: str, *args: Any, **kwargs: Any) -> Any:
            if name == methods[0]:
                self.kwargs[instance_id] = kwargs
            await DEEDS[self.kwargs[instance_id].get(name)]()
            return await getattr(cls, name)(self, instance_id, *args, **kwargs)

        return run

    return type(f"Hostile{cls.__name__}", (cls,), {name: method(name) for name in methods})


class Tool(Adder):
    """Tool that adds two numbers, or returns what the row says."""

    has_verdict = True
    kwargs: ClassVar[dict[str, Any]] = {}

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        response = ToolResponse(text=str(parameters["a"] + parameters["b"]))
        parameters.clear()
        found: dict[str | None, Any] = {
            None: (response, 0.5, {}),
            "nothing": None,
            "garbage": object(),
            "nan": (response, math.nan, {}),
            "long_text": "x" * 3_000_000,
        }
        return found[self.kwargs[instance_id].get("returns")]

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return self.kwargs[instance_id].get("verdict")


class Interaction(BaseInteraction):
    """Interaction that replies once, or returns what the row says."""

    kwargs: ClassVar[dict[str, Any]] = {}

    async def generate_response(self, instance_id: str, messages: list[Any], **kwargs: Any) -> Any:
        messages.clear()
        found: dict[str | None, Any] = {
            None: (True, "good bye", 0.25, {}),
            "garbage": object(),
            "short": (True,),
        }
        return found[kwargs.get("returns")]

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> Any:
        return self.kwargs[instance_id].get("verdict")


TOOL_METHODS = ("create", "execute", "calc_reward", "release")
INTERACTION_METHODS = ("start_interaction", "generate_response", "calculate_score", "finalize_interaction")


@register("hostile_loop")
class HostileLoop(AgentLoopBase):
    """Loop that samples one turn and then does what the row says."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        async with self.episode(row["raw_prompt"]) as episode:
            await episode.generate(sampling_params)
            if row.get("goes_on"):
                await self._go_on_although_cancelled(sampling_params)
            await DEEDS[row.get("deed")]()
        output = episode.output(reward_score=1.0)
        row["raw_prompt"].clear()
        found = {None: output, "nothing": None, "list_of_garbage": [output, 5], "two": [output, output]}
        return found[row.get("returns")]

    async def _go_on_although_cancelled(self, sampling_params: Mapping[str, Any]) -> None:
        while not Released.now.event.is_set():
            try:
                await asyncio.sleep(1)
                await self.server_manager.generate(
                    "again", prompt_ids=[1, 2], sampling_params=dict(sampling_params)
                )
            except BaseException:
                await asyncio.sleep(1)


def script(request: ScriptedRequest) -> ScriptedReply:
    """Return a call of the tool if the prompt asks for it, and then an answer."""
    text = small_tokenizer().decode(request.prompt_ids.tolist())
    if "add" in text and request.turn == 0:
        return tool_call_reply("add", a=1, b=2)
    return text_reply(f"{len(request.prompt_ids) % 7}", latency_s=0.25)


def exits() -> None:
    raise SystemExit(4)


async def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> Any:
    """Return the reward of a harmless row, which depends only on the answer, or do what the row says."""
    told = row.get("reward_does", {})
    row.clear()  # type: ignore[attr-defined]
    await DEEDS[told.get("deed")]()
    if "in_thread" in told:
        threads = {"hangs": Released.now.threads.wait, "exits": exits, "returns_garbage": object}
        return await call_function(threads[told["in_thread"]])
    length = len(output.response_ids)
    return told.get("returns", {"reward": length % 3 / 2, "length": length})


@dataclass(frozen=True)
class Kind:
    """Kind of misbehaviour: the columns of the rows that show it, and how such a row ends."""

    columns: Mapping[str, Any]
    ends: str
    """Stop reason, and the type of the failure if there is one."""
    num_abandoned: int = 0

    def row(self, number: int) -> dict[str, Any]:
        text = "add" if "tools_kwargs" in self.columns else "hello"
        return {**self.columns, "raw_prompt": user(f"{text} {number}")}


def tool(ends: str, num_abandoned: int = 0, **does: Any) -> Kind:
    return Kind({"tools_kwargs": {"add": {"create_kwargs": does}}}, ends, num_abandoned)


def interaction(ends: str, num_abandoned: int = 0, **does: Any) -> Kind:
    return Kind({"interaction_kwargs": {"name": "hostile", **does}}, ends, num_abandoned)


def scored(ends: str, num_abandoned: int = 0, **does: Any) -> Kind:
    return Kind({"reward_does": does}, ends, num_abandoned)


def loop(ends: str, num_abandoned: int = 0, **columns: Any) -> Kind:
    return Kind({"agent_name": "hostile_loop", **columns}, ends, num_abandoned)


def make_kinds() -> list[Kind]:
    found: list[Kind] = []
    loop_ends = {"hangs": "deadline", "swallows": "deadline", "raises": "failed ValueError"}
    for deed in filter(None, DEEDS):
        abandoned = int(deed == "swallows")
        of_call = "answered" if deed == "hangs" else "failed ToolBug"
        for method, ends in zip(TOOL_METHODS, (of_call, of_call, "failed ToolBug", "answered"), strict=True):
            found.append(tool(ends, abandoned, **{method: deed}))
        bug = "failed EnvironmentBug"
        for method, ends in zip(INTERACTION_METHODS, (bug, bug, bug, "interaction_finished"), strict=True):
            found.append(interaction(ends, abandoned, **{method: deed}))
        found.append(scored("failed RewardError", abandoned, deed=deed))
        found.append(loop(loop_ends.get(deed, "failed RuntimeError"), abandoned, deed=deed))
    return [
        *found,
        tool("failed ToolBug", verdict=math.nan),
        interaction("failed EnvironmentBug", verdict=math.nan),
        scored("failed RewardError", returns=math.nan),
        *(tool("failed ToolBug", returns=each) for each in ("nothing", "garbage", "nan")),
        tool("answered", returns="long_text"),
        *(interaction("failed EnvironmentBug", returns=each) for each in ("garbage", "short")),
        *(scored("failed RewardError", in_thread=each) for each in ("hangs", "exits", "returns_garbage")),
        *(loop("failed EpisodeError", returns=each) for each in ("nothing", "list_of_garbage")),
        loop("answered", returns="two"),
        loop("deadline", 1, goes_on=True),
    ]


def harmless_row(number: int) -> dict[str, Any]:
    """Return a row that does nothing wrong. A third of these rows use each component."""
    row: dict[str, Any] = {"raw_prompt": user(f"{'add' if number % 3 == 0 else 'hello'} {number}")}
    if number % 3 == 1:
        row["interaction_kwargs"] = {"name": "hostile"}
    return row


def run(rows: Sequence[Row], released: Released) -> tuple[list[Trajectory], int]:
    """Run rows in groups, and check that nothing is left after all hanging code is released.

    Return the trajectories in the order of the rows, and the number of abandoned tasks.
    """
    jobs = [Job(row, n // GROUP, n % GROUP, {"temperature": 1.0}) for n, row in enumerate(rows)]

    async def scenario() -> tuple[list[Trajectory], int]:
        harness = WorkerHarness(
            script,
            tools=[misbehaving(Tool, *TOOL_METHODS)()],
            interactions={"hostile": misbehaving(Interaction, *INTERACTION_METHODS)({"name": "hostile"})},
            reward=RewardFunction(reward, timeout_s=10.0),
            multi_turn=MultiTurnConfig(tool_timeout_s=10, interaction_timeout_s=10, close_timeout_s=5),
            deadline_s=100.0,
            request_timeout_s=20.0,
            silence_s=1e6,
            response_length=400,
            prompt_length=400,
        )
        trajectories = await harness.worker.run(jobs)
        num_left = num_abandoned()
        released.set()
        await asyncio.sleep(LONG_S)
        assert num_abandoned() == 0
        harness.assert_nothing_is_left()
        return trajectories, num_left

    try:
        found = run_virtual(scenario())
    finally:
        released.set()
    threads = [thread for thread in threading.enumerate() if thread.name == "agent-loop-thread"]
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return found


def ended(trajectory: Trajectory) -> str:
    """Return the stop reason, and the type of the failure if there is one."""
    output = trajectory.output
    if output.failure is None:
        return str(output.stop_reason)
    return f"{output.stop_reason} {output.failure.error.partition(':')[0]}"


def facts(trajectory: Trajectory) -> list[Any]:
    """Return the values that must not depend on other rows."""
    output = trajectory.output
    assert output.response_logprobs is not None
    arrays = (output.prompt_ids, output.response_ids, output.response_mask, output.response_logprobs)
    return [
        *(array.tolist() for array in arrays),
        *(output.messages, output.stop_reason, output.feedback, output.incidents),
        *(trajectory.reward, trajectory.reward_extra),
    ]


def test_hostile_rows_end_with_a_reason_and_leak_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    harmless = [harmless_row(number) for number in range(NUM_HARMLESS)]
    alone, _ = run(harmless, Released())
    open_files = partial(os.listdir, "/proc/self/fd")
    num_files = len(open_files())

    bad = make_kinds()
    kinds: list[Kind | None] = [*bad]
    rows: list[Row] = [kind.row(number) for number, kind in enumerate(bad)]
    for number, row in enumerate(harmless):
        kinds.insert(4 * number, None)
        rows.insert(4 * number, row)
    trajectories, num_left = run(rows, Released())

    first_of = {t.group * GROUP + t.rollout: t for t in trajectories if not t.branch}
    assert sorted(first_of) == list(range(len(rows)))
    wrong = [
        (kind.columns, ended(first_of[n]), first_of[n].output.failure)
        for n, kind in enumerate(kinds)
        if kind is not None and ended(first_of[n]) != kind.ends
    ]
    assert wrong == []
    abandoned = {
        n: Counter(i.kind for i in t.output.incidents)[IncidentKind.ABANDONED] for n, t in first_of.items()
    }
    assert abandoned == {n: 0 if kind is None else kind.num_abandoned for n, kind in enumerate(kinds)}
    assert num_left == sum(abandoned.values()) > 0
    together = [first_of[n] for n, kind in enumerate(kinds) if kind is None]
    assert list(map(facts, together)) == list(map(facts, alone))
    assert len(open_files()) == num_files
    assert list((tmp_path / "temp").iterdir()) == []

    batch = assemble(trajectories, pad_token_id=hermes_template().pad_token_id)
    assert batch["rollout_log_probs"].isfinite().all()
    assert batch["reward"][batch["is_scored"]].isfinite().all()
