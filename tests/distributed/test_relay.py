"""What workers record comes to the driver in order, and is safe when they are told so."""

from __future__ import annotations

import asyncio
from typing import Any

from agent_loop.distributed.batch import Batch
from agent_loop.distributed.relay import SEND_WITHIN_S, Relay
from agent_loop.recording.record import RecordEntry, RecordKind, RecordPosition
from agent_loop.recording.row_log import RowLog
from agent_loop.recording.values import pack
from agent_loop.rollout.jobs import Job
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import Row, StopReason

ROW: Row = {"raw_prompt": []}


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def append(self, payload: bytes) -> None:
        self.payloads.append(payload)

    async def flushed(self, *, to_disk: bool = False) -> None:
        pass


def test_records_wait_a_moment_and_are_safe_when_the_driver_asks_again() -> None:
    async def scenario() -> None:
        clock, has_news = asyncio.get_running_loop().time, asyncio.Event()
        relay = Relay(has_news.set)
        first, second = relay.sink("first"), relay.sink("second")
        first.append(b"1")
        second.append(b"2")
        await has_news.wait()
        assert clock() == SEND_WITHIN_S
        assert relay.fetch() == [("first", b"1"), ("second", b"2")]
        has_news.clear()
        async with asyncio.TaskGroup() as group:
            flushing = group.create_task(second.flushed())
            await asyncio.sleep(60)
            assert not flushing.done()
            relay.confirm()
        assert not has_news.is_set()

    run_virtual(scenario())


def test_who_needs_a_record_to_be_safe_does_not_wait_for_others() -> None:
    async def scenario() -> None:
        has_news = asyncio.Event()
        relay = Relay(has_news.set)
        relay.sink("row").append(b"1")
        async with asyncio.TaskGroup() as group:
            flushing = group.create_task(relay.flushed())
            cancelled = group.create_task(relay.flushed())
            await has_news.wait()
            assert asyncio.get_running_loop().time() == 0
            cancelled.cancel()
            assert relay.fetch() == [("row", b"1")]
            relay.confirm()
            await flushing
        await relay.flushed()

    run_virtual(scenario())


def recorded(kind: RecordKind, turn: int) -> bytes:
    return pack(
        {"is": kind, "row": "group=0/rollout=0", "at": RecordPosition(0, turn), "asked": "x", "got": None}
    )


def logged_batch(sink: Kept) -> tuple[Batch, Any]:
    job = Job(ROW, 0, 0, {}, RowLog("group=0/rollout=0", sink=sink))
    batch = Batch([job], lambda _: None)
    [chunk] = batch.next_chunks([_worker("first")])
    return batch, chunk


def test_the_next_worker_of_a_row_gets_what_the_last_one_recorded() -> None:
    sink = Kept()

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


def test_a_row_whose_end_is_on_record_is_not_run_again() -> None:
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2, 3], response_mask=[1, 1], num_turns=2)
    trajectory = Trajectory(output, ROW, 0, 0, reward=0.5, reward_extra={})

    async def scenario() -> None:
        batch, chunk = logged_batch(Kept())
        relay = Relay(lambda: None)
        log = RowLog("group=0/rollout=0", sink=relay.sink("group=0/rollout=0"))
        async with asyncio.TaskGroup() as group:
            group.create_task(log.end([trajectory]))
            await asyncio.sleep(0)
            await batch.keep(relay.fetch())
            relay.confirm()
        assert await batch.put_back(chunk, max_restarts=5, reason="killed before it handed the row over") == 0
        assert batch.is_complete
        [kept] = batch.trajectories
        assert (kept.reward, kept.output.response_ids.tolist()) == (0.5, [2, 3])

    run_virtual(scenario())


def test_a_row_that_is_given_up_has_its_end_on_record() -> None:
    sink = Kept()

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
