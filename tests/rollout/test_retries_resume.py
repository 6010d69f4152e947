"""A run that is killed while trajectories wait for their retry, or run again, resumes and loses nothing."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from msgspec import structs

from agent_loop.errors import RewardUnavailable
from agent_loop.recording.record import RecordKind
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.journal import open_journal
from agent_loop.runtime.instances import OnReplay
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, IncidentKind, Trajectory
from agent_loop.types import Row
from tests.harness import examples, thinned
from tests.helpers import hermes_template, text_reply, tool_call_reply, user
from tests.rollout.harness import Adder, Line, Outage, WorkerHarness, error_of, retries_of, station_row
from tests.rollout.journaled import ends_of_records, facts, key_of, records_of, run_journaled

RETRIES = 2
ROWS = [
    station_row(0),
    station_row(1),
    {"raw_prompt": user("note it, 2"), "number": 2},
    {"raw_prompt": user("note it, 3"), "number": 3, "interaction_kwargs": {"name": "line"}},
]
FAILURES = {1: 2, 2: 1, 3: 1}
"""Number of failures of each row: of its environment, its reward function or its simulated user."""


def calls_once(request: ScriptedRequest) -> ScriptedReply:
    """Call a tool, and answer. The completion depends on the conversation alone."""
    text = hermes_template().decode(request.prompt_ids.tolist())
    if "<tool_response>" not in text:
        return tool_call_reply("note" if "note it" in text else "add", a=1, b=2)
    return text_reply(f"answer {text.count('assistant')}")


class World:
    """Everything outside of the process: the services that fail, and the worker that uses them."""

    def __init__(self, *, is_failing: bool = True, on_replay: OnReplay = OnReplay.RERUN) -> None:
        failures = FAILURES if is_failing else dict.fromkeys(FAILURES, 0)
        self.outage = Outage(method="reward", num_failures=failures)
        self.tool = Adder({"latency_s": 0.2}, name="note")
        self.tool.on_replay = on_replay
        self._num_failed_rewards = failures[2]
        self.harness = WorkerHarness(
            calls_once,
            tools=[self.tool],
            environments={"station": self.outage.factory},
            interactions={"line": Line(num_failures=failures[3])},
            reward=RewardFunction(self._judge, timeout_s=1),
            retries=RETRIES,
        )

    async def _judge(self, output: AgentLoopOutput, row: Row) -> float:
        if row["number"] == 2 and self._num_failed_rewards:
            self._num_failed_rewards -= 1
            raise RewardUnavailable("the judge is down")
        return row["number"] / 8

    def run(
        self, path: Path, *, killed_after_s: float | None = None, resume: bool = True
    ) -> list[Trajectory]:
        """Run the rows with a journal. Return nothing if the run is killed."""
        if killed_after_s is None:
            return run_journaled(path, self.harness, ROWS, resume=resume)

        async def scenario() -> None:
            async with open_journal(path, key=key_of(ROWS), rows=ROWS, resume=resume) as journal:
                _, jobs = journal.divide(self.harness.jobs(ROWS))
                task = asyncio.create_task(self.harness.worker.run(jobs))
                asyncio.get_running_loop().call_later(killed_after_s, task.cancel)
                with suppress(asyncio.CancelledError):
                    await task

        run_virtual(scenario())
        return []


@cache
def uncut() -> tuple[bytes, tuple[Trajectory, ...]]:
    """Return the journal and the trajectories of a run that is not killed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        trajectories = World().run(path, resume=False)
        return path.read_bytes(), tuple(trajectories)


def result(trajectory: Trajectory) -> list[Any]:
    """Return the facts of a trajectory without its incidents, which say how often it was started."""
    return facts(structs.replace(trajectory, output=replace(trajectory.output, incidents=())))


def assert_nothing_is_lost(path: Path, data: bytes, *, world: World) -> None:
    """Resume a journal, and check the trajectories against those of the run that was not killed."""
    path.write_bytes(data)
    ended = {record["row"] for record in records_of(data) if record["is"] == RecordKind.END}
    trajectories = world.run(path)
    assert [result(t) for t in trajectories] == [result(t) for t in uncut()[1]]
    for trajectory in trajectories:
        kinds = {incident.kind for incident in trajectory.output.incidents}
        assert kinds <= {IncidentKind.RETRIED, IncidentKind.RESTARTED}
        if trajectory.trajectory_id in ended:
            assert not world.outage.num_attempts[trajectory.group]
    again = World()
    assert [facts(t) for t in again.run(path)] == [facts(t) for t in trajectories]
    assert again.harness.server.requests == []


def test_the_run_that_is_not_killed_runs_every_row_again_as_often_as_it_failed() -> None:
    data, trajectories = uncut()
    assert [t.reward for t in trajectories] == [1.0, 1.0, 2 / 8, 3 / 8]
    assert [len(retries_of(t)) for t in trajectories] == [0, 2, 1, 1]
    restarts = [record["why"] for record in records_of(data) if record["is"] == RecordKind.RESTART]
    assert len(restarts) == 3
    assert all("is down" in why for why in restarts)


@pytest.mark.parametrize(
    ("is_failing", "on_replay"),
    [(True, OnReplay.RERUN), (True, OnReplay.RESTART), (False, OnReplay.RECORDED)],
)
def test_a_journal_cut_after_any_record_loses_nothing(
    tmp_path: Path, is_failing: bool, on_replay: OnReplay
) -> None:
    data, _ = uncut()
    cuts = list(ends_of_records(data))
    assert len(cuts) > 50
    for number, cut in enumerate(thinned(cuts, step=5)):
        world = World(is_failing=is_failing, on_replay=on_replay)
        assert_nothing_is_lost(tmp_path / f"{number}", data[:cut], world=world)


@examples(15, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(times_s=st.lists(st.floats(0.1, 5), min_size=1, max_size=3))
def test_a_run_killed_at_any_times_ends_with_the_trajectories_of_an_uncut_run(times_s: list[float]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        for seconds in times_s:
            World().run(path, killed_after_s=seconds)
        assert_nothing_is_lost(path, path.read_bytes(), world=World())


def test_a_row_that_used_a_tool_once_before_its_failure_never_uses_it_again(tmp_path: Path) -> None:
    path = tmp_path / "j"
    assert "tool 'note' was used and may be used only once" in error_of(
        World(on_replay=OnReplay.ONCE).run(path, resume=False)[3]
    )
    data = path.read_bytes()
    for number, cut in enumerate(ends_of_records(data)):
        records = records_of(data[:cut])
        num_begun = sum(r["is"] == RecordKind.CALL_BEGAN and r["got"] is not None for r in records)
        path = tmp_path / f"{number}"
        path.write_bytes(data[:cut])
        again = World(is_failing=False, on_replay=OnReplay.ONCE)
        assert [t.group for t in again.run(path)] == [0, 1, 2, 3]
        assert num_begun + len(again.tool.executed) == 2
