"""Records of workers reach the driver in order, and count as stored only once the driver has confirmed it."""

from __future__ import annotations

import asyncio
from typing import Any

from agent_loop.distributed.job_batch import JobBatch
from agent_loop.distributed.worker_actor import JobRun, RowRecordSink
from agent_loop.recording.record import RecordEntry, RecordKind, RecordPosition
from agent_loop.recording.row_log import RowLog
from agent_loop.recording.values import pack
from agent_loop.rollout.jobs import Job
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import Row, StopReason

ROW: Row = {"raw_prompt": []}


class ListSink:
    """Sink that keeps its payloads in a list."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def append(self, payload: bytes) -> None:
        self.payloads.append(payload)

    async def flushed(self, *, to_disk: bool = False) -> None:
        pass


def test_records_are_stored_once_the_driver_has_confirmed_their_update() -> None:
    async def scenario() -> None:
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

    run_virtual(scenario())


def recorded(kind: RecordKind, turn: int) -> bytes:
    return pack(
        {"is": kind, "row": "group=0/rollout=0", "at": RecordPosition(0, turn), "asked": "x", "got": None}
    )


def logged_batch(sink: ListSink) -> tuple[JobBatch, Any]:
    job = Job(ROW, 0, 0, {}, RowLog("group=0/rollout=0", sink=sink))
    batch = JobBatch([job], lambda _: None)
    [chunk] = batch.next_chunks([_worker("first")])
    return batch, chunk


def test_the_next_worker_of_a_row_gets_the_records_of_the_last_one() -> None:
    sink = ListSink()

    async def scenario() -> None:
        batch, chunk = logged_batch(sink)
        await batch.keep([("group=0/rollout=0", recorded(RecordKind.PROMPT, 0))])
        await batch.keep([("group=0/rollout=0", recorded(RecordKind.COMPLETION, 1))])
        assert await batch.put_back(chunk, max_restarts=5, reason="killed") == 1
        [chunk] = batch.next_chunks([_worker("second")])
        assert _entries(chunk.jobs[0]) == [
            (RecordKind.PROMPT, (0, 0, 0), "x", None),
            (RecordKind.COMPLETION, (0, 1, 0), "x", None),
        ]
        await batch.keep([("group=0/rollout=0", recorded(RecordKind.OBSERVATION, 2))])
        await batch.put_back(chunk, max_restarts=5, reason="killed")
        [chunk] = batch.next_chunks([_worker("third")])
        assert [entry[0] for entry in _entries(chunk.jobs[0])] == [
            RecordKind.PROMPT,
            RecordKind.COMPLETION,
            RecordKind.OBSERVATION,
        ]

    run_virtual(scenario())
    assert len(sink.payloads) == 3


def test_a_row_whose_end_is_recorded_is_not_run_again() -> None:
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2, 3], response_mask=[1, 1], num_turns=2)
    trajectory = Trajectory(output, ROW, 0, 0, reward=0.5, reward_extra={})

    async def scenario() -> None:
        batch, chunk = logged_batch(ListSink())
        run = JobRun()
        log = RowLog("group=0/rollout=0", sink=RowRecordSink(run, "group=0/rollout=0"))
        ending = asyncio.create_task(log.end([trajectory]))
        await batch.keep((await anext(run.updates())).records)
        run.confirm()
        await ending
        assert await batch.put_back(chunk, max_restarts=5, reason="killed before it sent the row") == 0
        assert batch.is_complete
        [kept] = batch.trajectories
        assert (kept.reward, kept.output.response_ids.tolist()) == (0.5, [2, 3])

    run_virtual(scenario())


def test_the_failure_of_a_row_whose_workers_died_is_recorded() -> None:
    sink = ListSink()

    async def scenario() -> None:
        batch, chunk = logged_batch(sink)
        for _ in range(3):
            await batch.put_back(chunk, max_restarts=2, reason="killed")
            if not batch.is_complete:
                [chunk] = batch.next_chunks([_worker("next")])
        assert batch.trajectories[0].output.stop_reason is StopReason.FAILED

    run_virtual(scenario())
    assert len(sink.payloads) == 1


def _worker(name: str) -> Any:
    return name


def _entries(job: Job) -> list[RecordEntry]:
    assert job.log is not None
    return job.log.record.entries
