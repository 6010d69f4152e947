"""The rows of one batch: who runs which, and what ended. Each ends once, whoever runs it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from agent_loop.distributed.remote_worker import RemoteWorker
from agent_loop.distributed.wire import job_of
from agent_loop.recording.row_log import RowLog
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.workers import split
from agent_loop.runtime.isolated_task import DeadlineExpired
from agent_loop.runtime.user_code import run_bounded
from agent_loop.trajectory import AgentLoopOutput, Failure, Trajectory
from agent_loop.types import StopReason


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Jobs that one worker runs."""

    worker: RemoteWorker
    jobs: Sequence[Job]
    is_alone: bool = False
    """The worker runs nothing else: one of these jobs may be what kills workers."""


class Batch:
    """The jobs of one `run`.

    What a dead worker leaves is shared among the others. Jobs that lose a second worker are suspects: they run apart
    from all others, in groups that are halved each time, so that a job that kills its worker is found and fails alone.
    """

    def __init__(self, jobs: Sequence[Job], note: Callable[[Trajectory], None]) -> None:
        """Args: note: Told of each trajectory that ended; what it raises ends the batch."""
        self.changed = asyncio.Event()
        """There is another job to hand out or another worker to take one, or nothing left to do."""
        self._jobs = jobs
        self._by_id = {job.job_id: job for job in jobs}
        self._note = note
        self._unassigned: list[Job] = list(jobs)
        self._suspects: list[Sequence[Job]] = []
        self._chunks: set[Chunk] = set()
        self._ended: dict[str, list[Trajectory]] = {}
        self._records: dict[str, list[bytes]] = {}
        """Of rows that run, by trajectory: what their present workers recorded."""
        self._num_restarts: Counter[str] = Counter()

    @property
    def is_complete(self) -> bool:
        return len(self._ended) == len(self._jobs)

    @property
    def num_unassigned(self) -> int:
        """Number of jobs without a worker."""
        return len(self._unassigned) + sum(map(len, self._suspects))

    @property
    def trajectories(self) -> list[Trajectory]:
        """In the order of the jobs."""
        return [trajectory for job in self._jobs for trajectory in self._ended[job.job_id]]

    def worker_of(self, trajectory_id: str) -> RemoteWorker | None:
        """Who runs it."""
        runs = (
            chunk.worker
            for chunk in self._chunks
            for job in chunk.jobs
            if job.trajectory_id == trajectory_id and job.job_id not in self._ended
        )
        return next(runs, None)

    def next_chunks(self, alive: Sequence[RemoteWorker]) -> list[Chunk]:
        """What the workers that are alive are to begin."""
        chunks: list[Chunk] = []
        takers = [w for w in alive if not any(c.worker is w and c.is_alone for c in self._chunks)]
        if takers:
            jobs, self._unassigned = self._unassigned, []
            shares = zip(takers, split(jobs, len(takers)), strict=True)
            chunks += [Chunk(worker, share) for worker, share in shares if share]
        busy = {chunk.worker for chunk in (*self._chunks, *chunks)}
        idle = [worker for worker in alive if worker not in busy]
        while idle and self._suspects:
            chunks.append(Chunk(idle.pop(), self._suspects.pop(0), is_alone=True))
        self._chunks.update(chunks)
        return chunks

    async def keep(self, records: Iterable[tuple[str, bytes]]) -> None:
        """Writes what workers recorded into the journal, and remembers it for the next worker of a row.

        Args:
            records: Trajectory and payload; those of rows that ended are left out.

        Raises:
            JournalError: The journal cannot be written.
        """
        log: RowLog | None = None
        for job_id, payload in records:
            if job_id in self._ended:
                continue
            log = self._by_id[job_id].log
            assert log is not None  # only rows that have a log are recorded
            log.take_over(payload)
            self._records.setdefault(job_id, []).append(payload)
        if log is not None:
            await log.flushed()

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Keeps what ended; nothing of a job that ended before."""
        new: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            if job_of(trajectory) not in self._ended:
                new.setdefault(job_of(trajectory), []).append(trajectory)
        self._ended |= new
        for job_id, outputs in new.items():
            self._records.pop(job_id, None)
            for trajectory in outputs:
                self._note(trajectory)
        if self.is_complete:
            self.changed.set()

    def close(self, chunk: Chunk) -> None:
        """A chunk has ended."""
        self._chunks.discard(chunk)
        self.changed.set()

    async def put_back(self, chunk: Chunk, *, max_restarts: int, reason: str) -> int:
        """A chunk's worker died: what it did not finish goes on elsewhere, or has failed. Returns how many that are.

        Raises:
            JournalError: The journal cannot be written.
        """
        left = [
            job for given in chunk.jobs if given.job_id not in self._ended for job in self._rest_of(given)
        ]
        self._num_restarts.update(job.job_id for job in left)
        if chunk.is_alone:
            if len(left) == 1 and self._num_restarts[left[0].job_id] > max_restarts:
                await self._give_up(left[0], reason=reason)
            else:
                self._suspects += [half for half in split(left, 2) if half]
        else:
            self._unassigned += [job for job in left if self._num_restarts[job.job_id] == 1]
            suspects = [job for job in left if self._num_restarts[job.job_id] > 1]
            self._suspects += [half for half in split(suspects, 2) if half]
        self.close(chunk)
        return len(left)

    async def wait_for_change(self, *, timeout_s: float | None) -> None:
        """Returns at once if something changed since the last time."""
        with suppress(DeadlineExpired):
            await run_bounded(self.changed.wait, timeout_s=timeout_s)
        if not self.is_complete:
            self.changed.clear()

    def _rest_of(self, job: Job) -> list[Job]:
        """The job, to go on from what is on record of it; nothing if the record says how it ended."""
        payloads = self._records.pop(job.job_id, None)
        if job.log is None or payloads is None:
            return [job]
        log = job.log.extended(payloads)
        if log.record.has_succeeded:
            self.add(log.record.trajectories(job.row, group=job.group, rollout=job.rollout))
            return []
        self._by_id[job.job_id] = replace(job, log=log)
        return [self._by_id[job.job_id]]

    async def _give_up(self, job: Job, *, reason: str) -> None:
        """Records a job that no worker survives."""
        times = self._num_restarts[job.job_id]
        failure = Failure(
            error=f"{times} workers died while they ran this row, the last one alone with it: {reason}",
            traceback="",
        )
        output = AgentLoopOutput(segments=(), stop_reason=StopReason.FAILED, failure=failure)
        trajectory = Trajectory(output, job.row, job.group, job.rollout, reward=None, reward_extra={})
        if job.log is not None:
            await job.log.end([trajectory])
        self.add([trajectory])
