"""Rows of a cluster: their division among workers that die, their records, and their way between processes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.distributed.job_batch import JobBatch, JobChunk
from agent_loop.distributed.messages import pack_trajectories, unpack_trajectories
from agent_loop.distributed.worker_actor import JobRun, RowRecordSink
from agent_loop.recording.record import RecordKind, RecordPosition
from agent_loop.recording.row_log import RowLog
from agent_loop.recording.values import pack
from agent_loop.rollout.jobs import Job
from agent_loop.testing import run_virtual
from agent_loop.trajectory import (
    AgentLoopOutput,
    FailureKind,
    Incident,
    IncidentKind,
    Segment,
    Trajectory,
)
from agent_loop.types import Origin, Row, StopReason


def workers(count: int) -> list[Any]:
    return [f"worker-{n}" for n in range(count)]


def make_batch(count: int, *, label: str = "") -> JobBatch:
    return JobBatch([Job({}, group, 0, {}, label=label) for group in range(count)], lambda _: None)


def finish(batch: JobBatch, *jobs: Job) -> None:
    output = AgentLoopOutput(segments=())
    batch.add(Trajectory(output, job.row, job.group, job.rollout, 1.0, {}) for job in jobs)


def groups(chunks: list[JobChunk]) -> list[list[int]]:
    return [[job.group for job in chunk.jobs] for chunk in chunks]


@pytest.mark.virtual_time
async def test_the_rows_of_a_dead_worker_are_divided_again_and_a_row_that_ended_twice_counts_once() -> None:
    batch = make_batch(8)
    first, second = batch.next_chunks(workers(2))
    finish(batch, *first.jobs[:2], *second.jobs)
    batch.close(second)
    assert await batch.put_back(first, max_restarts=5, reason="killed") == 2
    again = batch.next_chunks(workers(2)[1:])
    assert groups(again) == [[2, 3]]
    finish(batch, *again[0].jobs)
    finish(batch, *again[0].jobs)
    assert batch.is_complete
    assert [trajectory.group for trajectory in batch.trajectories] == list(range(8))


@given(
    num_jobs=st.integers(1, 40),
    num_workers=st.integers(1, 5),
    killers=st.sets(st.integers(0, 39), max_size=3),
    accidents=st.lists(st.booleans(), max_size=6),
)
def test_rows_that_kill_their_workers_fail_and_no_others(
    num_jobs: int, num_workers: int, killers: set[int], accidents: list[bool]
) -> None:
    async def scenario() -> None:
        batch, alive, running = make_batch(num_jobs), workers(num_workers), []
        while not batch.is_complete:
            running += batch.next_chunks(alive)
            chunk = running.pop(0)
            deadly = {job.group for job in chunk.jobs} & killers
            if deadly or (accidents and accidents.pop()):
                # A worker's death ends all its rows. An innocent row loses fewer than twenty workers: two with all
                # other rows, six in halvings, six in accidents.
                for victim in [chunk, *(other for other in running if other.worker == chunk.worker)]:
                    running = [other for other in running if other is not victim]
                    await batch.put_back(victim, max_restarts=20, reason="killed")
            else:
                finish(batch, *chunk.jobs)
                batch.close(chunk)
        failed = {t.group for t in batch.trajectories if t.output.stop_reason is StopReason.FAILED}
        failures = [t.output.failure for t in batch.trajectories if t.output.failure is not None]
        assert all(failure.kind is FailureKind.WORKER and not failure.is_retried for failure in failures)
        assert failed == {job for job in killers if job < num_jobs}

    run_virtual(scenario())


def test_trajectories_of_a_labelled_rollout_are_found_by_group_and_rollout() -> None:
    batch = make_batch(2, label="step=3")
    [chunk] = batch.next_chunks(workers(1))
    assert batch.worker_of("step=3/group=1/rollout=0") == "worker-0"
    finish(batch, *chunk.jobs)
    assert [trajectory.group for trajectory in batch.trajectories] == [0, 1]
    assert batch.worker_of("step=3/group=1/rollout=0") is None


ROW: Row = {"raw_prompt": [], "huge": "x" * 10_000}
NAME = "group=0/rollout=0"


@pytest.mark.virtual_time
async def test_records_are_stored_once_the_driver_has_confirmed_their_update() -> None:
    run = JobRun()
    first, second = RowRecordSink(run, "first"), RowRecordSink(run, "second")
    updates = run.updates()
    first.append(b"1")
    second.append(b"2")
    flushing = asyncio.create_task(second.flushed())
    await asyncio.sleep(0)
    assert (await anext(updates)).records == [("first", b"1"), ("second", b"2")]
    first.append(b"3")
    assert (await anext(updates)).records == [("first", b"3")]
    flushing_later = asyncio.create_task(first.flushed())
    await asyncio.sleep(60)
    assert not flushing.done()
    run.confirm()
    await flushing
    assert not flushing_later.done()
    run.confirm()
    await flushing_later
    await first.flushed()


class ListSink:
    """Sink that keeps its payloads in a list."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def append(self, payload: bytes) -> None:
        self.payloads.append(payload)

    async def flushed(self, *, to_disk: bool = False) -> None:
        pass


class LoggedRow:
    """Batch of one row, whose records are kept."""

    def __init__(self) -> None:
        self.sink = ListSink()
        self.batch = JobBatch([Job(ROW, 0, 0, {}, RowLog(NAME, sink=self.sink))], lambda _: None)
        [self.chunk] = self.batch.next_chunks(workers(1))

    async def record(self, kind: RecordKind, turn: int) -> None:
        record = {"is": kind, "row": NAME, "at": RecordPosition(0, turn), "asked": "x", "got": None}
        await self.batch.keep([(NAME, pack(record))])

    async def lose_worker(self, *, max_restarts: int = 5) -> int:
        """Let the row's worker die, give the row to another one, and return the number of rows that were put back."""
        count = await self.batch.put_back(self.chunk, max_restarts=max_restarts, reason="killed")
        if not self.batch.is_complete:
            [self.chunk] = self.batch.next_chunks(workers(1))
        return count

    def entries(self) -> list[Any]:
        log = self.chunk.jobs[0].log
        assert log is not None
        return log.record.entries


@pytest.mark.virtual_time
async def test_the_next_worker_of_a_row_gets_the_records_of_the_last_one() -> None:
    row = LoggedRow()
    await row.record(RecordKind.PROMPT, 0)
    await row.record(RecordKind.COMPLETION, 1)
    assert await row.lose_worker() == 1
    assert row.entries() == [
        (RecordKind.PROMPT, (0, 0, 0), "x", None),
        (RecordKind.COMPLETION, (0, 1, 0), "x", None),
    ]
    await row.record(RecordKind.OBSERVATION, 2)
    await row.lose_worker()
    kinds = [entry[0] for entry in row.entries()]
    assert kinds == [RecordKind.PROMPT, RecordKind.COMPLETION, RecordKind.OBSERVATION]
    assert len(row.sink.payloads) == 3


@pytest.mark.virtual_time
async def test_a_row_whose_end_is_recorded_is_not_run_again() -> None:
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2, 3], response_mask=[1, 1], num_turns=2)
    row, run = LoggedRow(), JobRun()
    log = RowLog(NAME, sink=RowRecordSink(run, NAME))
    ending = asyncio.create_task(log.end([Trajectory(output, ROW, 0, 0, reward=0.5, reward_extra={})]))
    await row.batch.keep((await anext(run.updates())).records)
    run.confirm()
    await ending
    assert await row.lose_worker() == 0
    assert row.batch.is_complete
    [kept] = row.batch.trajectories
    assert (kept.reward, kept.output.response_ids.tolist()) == (0.5, [2, 3])


@pytest.mark.virtual_time
async def test_the_failure_of_a_row_whose_workers_died_is_recorded() -> None:
    row = LoggedRow()
    for _ in range(3):
        await row.lose_worker(max_restarts=2)
    assert row.batch.trajectories[0].output.stop_reason is StopReason.FAILED
    assert len(row.sink.payloads) == 1


JOB = Job(ROW, 3, 1, {"temperature": 1.0})
JOBS = {JOB.trajectory_id: JOB}


def trajectory(**fields: Any) -> Trajectory:
    segments = [
        Segment(np.asarray([1, 2], np.int32), Origin.PROMPT),
        Segment(np.asarray([3], np.int32), Origin.MODEL, np.asarray([-0.1], np.float32), 7),
        Segment(np.asarray([4, 5], np.int32), Origin.TOOL),
        Segment(np.asarray([6], np.int32), Origin.MODEL, None, 8),
    ]
    output = AgentLoopOutput(
        segments=segments,
        stop_reason=StopReason.RESPONSE_LENGTH,
        messages=[{"role": "user", "content": "?"}],
        incidents=[Incident(IncidentKind.CUT_TURN, "length", 1)],
        reward_score=0.5,
        **fields,
    )
    return Trajectory(output, ROW, 3, 1, reward=0.5, reward_extra={"a": 1}, branch=2)


def form(segment: Segment) -> tuple[Any, ...]:
    logprobs = None if segment.logprobs is None else segment.logprobs.tobytes()
    return segment.token_ids.tolist(), segment.origin, segment.weight_version, logprobs


def test_a_trajectory_arrives_unchanged_and_is_sent_without_its_row() -> None:
    sent = trajectory(extra_fields={"note": "n"})
    packed = pack_trajectories([sent])
    assert len(packed) < 3000
    [found] = unpack_trajectories(packed, jobs=JOBS)
    assert found.row is ROW
    assert (found.trajectory_id, found.reward, found.reward_extra) == (sent.trajectory_id, 0.5, {"a": 1})
    assert list(map(form, found.output.segments)) == list(map(form, sent.output.segments))
    for name in ("stop_reason", "messages", "incidents", "reward_score", "extra_fields", "num_turns"):
        assert getattr(found.output, name) == getattr(sent.output, name)


def test_a_trajectory_that_cannot_be_sent_arrives_as_failed_and_the_others_unchanged() -> None:
    bad = trajectory(extra_fields={"f": lambda: None})
    other = Job(ROW, 4, 0, {})
    good = Trajectory(trajectory().output, ROW, 4, 0, reward=1.0, reward_extra={})
    first, second = unpack_trajectories(
        pack_trajectories([bad, good]), jobs={**JOBS, other.trajectory_id: other}
    )
    assert first.output.failure is not None
    assert "cannot be sent" in first.output.failure.error
    assert first.reward is None
    assert first.output.response_ids.tolist() == [3, 4, 5, 6]
    assert (second.output.failure, second.reward) == (None, 1.0)


def test_a_trajectory_of_another_batch_is_ignored() -> None:
    assert unpack_trajectories(pack_trajectories([trajectory()]), jobs={}) == []
