"""Assignment of rows to workers, when workers die."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent_loop.distributed.job_batch import JobBatch, JobChunk
from agent_loop.rollout.jobs import Job
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, FailureKind, Trajectory
from agent_loop.types import StopReason


def workers(count: int) -> list[Any]:
    return [f"worker-{n}" for n in range(count)]


def make_batch(count: int) -> JobBatch:
    return JobBatch([Job({}, group, 0, {}) for group in range(count)], lambda _: None)


def finish(batch: JobBatch, *jobs: Job) -> None:
    output = AgentLoopOutput(segments=())
    batch.add(Trajectory(output, job.row, job.group, job.rollout, 1.0, {}) for job in jobs)


def groups(chunks: list[JobChunk]) -> list[list[int]]:
    return [[job.group for job in chunk.jobs] for chunk in chunks]


def test_rows_are_divided_among_workers_and_the_rows_of_a_dead_worker_are_divided_again() -> None:
    async def scenario() -> None:
        batch = make_batch(8)
        first, second = batch.next_chunks(workers(2))
        finish(batch, *first.jobs[:2], *second.jobs)
        batch.close(second)
        assert await batch.put_back(first, max_restarts=5, reason="killed") == 2
        again = batch.next_chunks(workers(2)[1:])
        assert groups(again) == [[2, 3]]
        finish(batch, *again[0].jobs)
        assert batch.is_complete
        assert [trajectory.group for trajectory in batch.trajectories] == list(range(8))

    run_virtual(scenario())


def test_a_row_that_ended_twice_counts_once() -> None:
    async def scenario() -> None:
        batch = make_batch(1)
        [chunk] = batch.next_chunks(workers(1))
        await batch.put_back(chunk, max_restarts=5, reason="out of reach")
        finish(batch, *chunk.jobs)
        finish(batch, *chunk.jobs)
        assert len(batch.trajectories) == 1

    run_virtual(scenario())


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
    batch = JobBatch([Job({}, group, 0, {}, label="step=3") for group in range(2)], lambda _: None)
    [chunk] = batch.next_chunks(workers(1))
    assert batch.worker_of("step=3/group=1/rollout=0") == "worker-0"
    finish(batch, *chunk.jobs)
    assert [trajectory.group for trajectory in batch.trajectories] == [0, 1]
    assert batch.worker_of("step=3/group=1/rollout=0") is None
