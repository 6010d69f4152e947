"""Jobs of one batch: which worker runs which job, and which jobs ended. Each job ends once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from agent_loop.distributed.messages import job_of
from agent_loop.distributed.remote_worker import RemoteWorker
from agent_loop.recording.row_log import RowLog
from agent_loop.rollout.jobs import Job
from agent_loop.runtime.isolated_task import DeadlineExpired
from agent_loop.runtime.user_code import run_bounded
from agent_loop.trajectory import AgentLoopOutput, Failure, FailureKind, Trajectory
from agent_loop.types import StopReason


@dataclass(frozen=True, slots=True, eq=False)
class JobChunk:
    """Jobs that are assigned to one worker."""

    worker: RemoteWorker
    jobs: Sequence[Job]
    is_alone: bool = False
    """Whether the worker runs no other jobs, because these jobs are suspected of killing workers."""


class JobBatch:
    """Jobs of one `run`, and their assignment to workers.

    The jobs of a dead worker are divided among the other workers. A job whose second worker dies is a suspect. Suspects
    run apart from all other jobs, in groups that are halved each time, until a job that kills its worker fails alone.
    """

    def __init__(self, jobs: Sequence[Job], on_trajectory: Callable[[Trajectory], None]) -> None:
        """Create a batch without assignments."""
        self.changed = asyncio.Event()
        """Set if there is another job to assign or another worker, and once the batch is complete."""
        self._jobs = jobs
        self._by_id = {job.job_id: job for job in jobs}
        self._on_trajectory = on_trajectory
        self._unassigned: list[Job] = list(jobs)
        self._suspects: list[Sequence[Job]] = []
        self._chunks: set[JobChunk] = set()
        self._ended: dict[str, list[Trajectory]] = {}
        self._records: dict[str, list[bytes]] = {}
        """Records that the current workers of the running rows have sent, by job id."""
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
        """All trajectories in the order of the jobs."""
        return [trajectory for job in self._jobs for trajectory in self._ended[job.job_id]]

    def worker_of(self, trajectory_id: str) -> RemoteWorker | None:
        """Return the worker that runs a trajectory, if any."""
        workers = (
            chunk.worker
            for chunk in self._chunks
            for job in chunk.jobs
            if job.trajectory_id == trajectory_id and job.job_id not in self._ended
        )
        return next(workers, None)

    def next_chunks(self, alive: Sequence[RemoteWorker]) -> list[JobChunk]:
        """Assign unassigned jobs to the workers that are alive, and return the new assignments."""
        chunks: list[JobChunk] = []
        available = [w for w in alive if not any(c.worker is w and c.is_alone for c in self._chunks)]
        if available:
            jobs, self._unassigned = self._unassigned, []
            shares = zip(available, split(jobs, len(available)), strict=True)
            chunks += [JobChunk(worker, share) for worker, share in shares if share]
        busy = {chunk.worker for chunk in (*self._chunks, *chunks)}
        idle = [worker for worker in alive if worker not in busy]
        while idle and self._suspects:
            chunks.append(JobChunk(idle.pop(), self._suspects.pop(0), is_alone=True))
        self._chunks.update(chunks)
        return chunks

    async def keep(self, records: Iterable[tuple[str, bytes]]) -> None:
        """Write records of workers to the journal, and keep them in case a row gets another worker.

        Args:
            records: Job id and payload. Records of jobs that ended are ignored.
        """
        log: RowLog | None = None
        for job_id, payload in records:
            if job_id in self._ended:
                continue
            log = self._by_id[job_id].log
            assert log is not None  # jobs without a log send no records
            log.take_over(payload)
            self._records.setdefault(job_id, []).append(payload)
        if log is not None:
            await log.flushed()

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Add trajectories that ended. Trajectories of jobs that ended before are ignored."""
        new: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            if job_of(trajectory) not in self._ended:
                new.setdefault(job_of(trajectory), []).append(trajectory)
        self._ended |= new
        for job_id, outputs in new.items():
            self._records.pop(job_id, None)
            for trajectory in outputs:
                self._on_trajectory(trajectory)
        if self.is_complete:
            self.changed.set()

    def close(self, chunk: JobChunk) -> None:
        """Remove an assignment whose jobs have ended or were put back."""
        self._chunks.discard(chunk)
        self.changed.set()

    async def put_back(self, chunk: JobChunk, *, max_restarts: int, reason: str) -> int:
        """Put back the unfinished jobs of a worker that died, and return their number.

        A job that reached its limit of restarts fails.
        """
        left = [
            job for given in chunk.jobs if given.job_id not in self._ended for job in self._resumable(given)
        ]
        self._num_restarts.update(job.job_id for job in left)
        if chunk.is_alone:
            if len(left) == 1 and self._num_restarts[left[0].job_id] > max_restarts:
                await self._fail(left[0], reason=reason)
            else:
                self._suspects += [half for half in split(left, 2) if half]
        else:
            self._unassigned += [job for job in left if self._num_restarts[job.job_id] == 1]
            suspects = [job for job in left if self._num_restarts[job.job_id] > 1]
            self._suspects += [half for half in split(suspects, 2) if half]
        self.close(chunk)
        return len(left)

    async def wait_for_change(self, *, timeout_s: float | None) -> None:
        """Wait for `changed`, and clear it unless the batch is complete."""
        with suppress(DeadlineExpired):
            await run_bounded(self.changed.wait, timeout_s=timeout_s)
        if not self.is_complete:
            self.changed.clear()

    def _resumable(self, job: Job) -> list[Job]:
        """Return the job with its records, so that it can be resumed; nothing if its records show that it ended."""
        payloads = self._records.pop(job.job_id, None)
        if job.log is None or payloads is None:
            return [job]
        log = job.log.extended(payloads)
        if log.record.has_succeeded:
            self.add(log.record.trajectories(job.row, group=job.group, rollout=job.rollout))
            return []
        self._by_id[job.job_id] = replace(job, log=log)
        return [self._by_id[job.job_id]]

    async def _fail(self, job: Job, *, reason: str) -> None:
        """Record the failure of a job whose workers all died."""
        times = self._num_restarts[job.job_id]
        failure = Failure(
            error=f"{times} workers died while they ran this row, the last one without other rows: {reason}",
            traceback="",
            kind=FailureKind.WORKER,
        )
        output = AgentLoopOutput(segments=(), stop_reason=StopReason.FAILED, failure=failure)
        trajectory = Trajectory(output, job.row, job.group, job.rollout, reward=None, reward_extra={})
        if job.log is not None:
            await job.log.end([trajectory])
        self.add([trajectory])


def split(jobs: Sequence[Job], num_chunks: int) -> list[Sequence[Job]]:
    """Split jobs into contiguous chunks whose sizes differ by at most one."""
    cuts = [len(jobs) * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return [jobs[start:end] for start, end in pairwise(cuts)]
