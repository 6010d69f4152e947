"""Workers: they run agent loops concurrently, and return a trajectory for each, however the loop ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol, cast

from msgspec import structs

from agent_loop.episode import EpisodeStopped
from agent_loop.episode.deadlines import FINISH_GRACE_S
from agent_loop.errors import ConfigError, JournalError
from agent_loop.loops.base import AgentLoopBase, LoopContext
from agent_loop.loops.registry import LoopRegistry
from agent_loop.recording.replay_log import ReplayLog
from agent_loop.recording.row_log import RowLog
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.failures import Attempt, FailureBudget, failure_of, retried, retry_delay_s
from agent_loop.rollout.gate import AdmissionGate
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.loop_outputs import LoopOutputs, listed_outputs
from agent_loop.rollout.monitor import TrajectoryMonitor, timed
from agent_loop.rollout.rows import TIMEOUT_COLUMN
from agent_loop.rollout.scoring import scored
from agent_loop.runtime.activity import Activity, WaitKind, waiting_for
from agent_loop.runtime.concurrency import run_together
from agent_loop.runtime.garbage_collection import infrequent_collections
from agent_loop.runtime.incidents import IncidentCollector
from agent_loop.runtime.isolated_task import ABANDON_GRACE_S, Abandoned, DeadlineExpired
from agent_loop.runtime.numeric import as_finite_number
from agent_loop.runtime.user_code import run_bounded
from agent_loop.seeds import seeded_trajectory
from agent_loop.servers.completion_memory import CompletionMemory
from agent_loop.trajectory import AgentLoopOutput, Failure, Incident, IncidentKind, Trajectory
from agent_loop.trajectory.copying import copied
from agent_loop.types import Row, StopReason
from agent_loop.workspaces.check import COPY_TIMEOUT_S
from agent_loop.workspaces.settings import CheckSettings, workspace_mapping

BEGIN_AT_ONCE = 64
"""Trajectories that are set up, and send their first request, before the next ones are set up. Without this limit, all
requests of a large rollout would wait until the last trajectory is set up."""
DEADLINE_GRACE_S = 15.0
"""Time after the deadline at which a loop is cancelled, in addition to the time of its workspace's check. An episode
ends at the deadline itself."""


class AgentLoopWorker:
    """Runs agent loops concurrently on one event loop.

    A trajectory that raises, hangs or is cancelled ends with a stop reason and its tokens, and does not disturb others.

    Args:
        context: Context of every loop. Its server manager is scoped to each trajectory.
        loops: The agent loops by name.
        default_agent_loop: The loop of rows without `agent_name`.
        reward: Scores trajectories that have no reward of their own. None leaves those unscored.
        gate: Admits trajectories. None admits all at once.
        monitor: Observes trajectories while they run. None disables monitoring.
        retries: How often a trajectory, or its reward alone, runs again after a failure of infrastructure.
    """

    def __init__(
        self,
        context: LoopContext,
        *,
        loops: LoopRegistry,
        default_agent_loop: str = "single_turn_agent",
        reward: RewardFunction | None = None,
        gate: AdmissionGate | None = None,
        monitor: TrajectoryMonitor | None = None,
        retries: int = 0,
    ) -> None:
        self._context = context
        self._retries = retries
        self._loops = loops
        self._default_agent_loop = default_agent_loop
        self._reward = reward
        self.gate = gate or AdmissionGate()
        self._monitor = monitor
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._cancelled: set[str] = set()
        self._renew_cancellation()

    @property
    def running(self) -> Sequence[str]:
        """Ids of the trajectories in flight."""
        return tuple(self._running)

    async def run(
        self,
        jobs: Sequence[Job],
        *,
        budget: FailureBudget | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Run all jobs and return their trajectories, in the same order.

        A loop that returns a list has one trajectory for each element.

        Raises:
            RolloutError: More trajectories failed than the budget allows; the others were cancelled.
            JournalError: The turns cannot be recorded.
        """

        async def run_one(job: Job) -> list[Trajectory]:
            async with self.gate:
                with self._monitored(job, requested_at=requested_at) as activity:
                    trajectories = await self._run_job(job, context)
            if activity is not None and lag is not None:
                trace = activity.trace()
                trajectories = [timed(trajectory, trace, lag=lag) for trajectory in trajectories]
            for trajectory in trajectories:
                if on_trajectory is not None:
                    on_trajectory(trajectory)
                if budget is not None:
                    budget.count(trajectory)
            return trajectories

        if not self._running:
            # An event belongs to the event loop that first waits for it.
            self._renew_cancellation()
        context, requested_at = self._context, asyncio.get_running_loop().time()
        watching = nullcontext() if self._monitor is None else self._monitor.watching()
        with infrequent_collections():
            async with self.gate.adapting(), watching as lag:
                by_job = await run_together((run_one(job) for job in jobs), begin_at_once=BEGIN_AT_ONCE)
        return [trajectory for trajectories in by_job for trajectory in trajectories]

    async def start(self) -> None:
        """Do nothing; see `Workers`."""

    async def close(self) -> None:
        """Do nothing; see `Workers`."""

    async def set_weight_version(self, weight_version: int) -> None:
        """Do nothing; the servers' pool in this process knows the version."""

    def cancel(self, trajectory_id: str) -> bool:
        """End one trajectory with `cancelled`, its tokens kept. Return whether it was in flight."""
        task = self._running.get(trajectory_id)
        if task is None:
            return False
        self._cancelled.add(trajectory_id)
        return task.cancel()

    def cancel_all(self) -> None:
        """End every trajectory of the present runs with `cancelled`, its tokens kept, also those that wait to start.

        Episodes end as soon as their requests and calls in flight are aborted. The outputs of
        `AsyncPartialToolAgentLoop` can be resumed. Loops that work on token ids are not cancelled.
        """
        self._cancellation.set()
        self._renew_cancellation()

    def _renew_cancellation(self) -> None:
        """Give trajectories that start from now on a new cancellation event."""
        self._cancellation = asyncio.Event()
        self._context = structs.replace(self._context, cancellation=self._cancellation)

    def _monitored(self, job: Job, *, requested_at: float) -> AbstractContextManager[Activity | None]:
        """Register a trajectory with the monitor in the body, if there is a monitor."""
        if self._monitor is None:
            return nullcontext()
        return self._monitor.activity_monitor.trajectory(job.trajectory_id, requested_at=requested_at)

    async def _run_job(self, job: Job, context: LoopContext) -> list[Trajectory]:
        task = asyncio.current_task()
        assert task is not None
        trajectory_id = job.trajectory_id
        self._running[trajectory_id] = task
        seed = job.seed if job.environment_seed is None else job.environment_seed
        with IncidentCollector(trajectory_id) as notes, seeded_trajectory(seed):
            try:
                attempt = await self._run_attempts(job, context)
            finally:
                del self._running[trajectory_id]
                self._cancelled.discard(trajectory_id)
            trajectories = await run_together(
                scored(
                    output,
                    job,
                    reward=self._reward,
                    retries=self._retries,
                    branch=branch if attempt.has_branches else None,
                )
                for branch, output in enumerate(attempt.outputs)
            )
        for incident in notes.incidents:
            trajectories[0] = trajectories[0].noted(incident)
        if job.log is not None:
            with waiting_for(WaitKind.JOURNAL):
                await job.log.end(trajectories)
        return trajectories

    async def _run_attempts(self, job: Job, context: LoopContext) -> Attempt:
        """Run the loop, and run it again while infrastructure fails it, at most `retries` times.

        If the record from before a crash does not match its replay, the row starts from its prompt. A row that used
        something that may be used only once is never run again.
        """
        log = job.log or RowLog(job.job_id)
        if job.recorded is not None:
            log = ReplayLog(job.job_id, job.recorded, continue_live=True)
        incidents: list[Incident] = []
        num_retries, has_restarted = 0, False
        while True:
            attempt = await self._run_loop(job, context, log=log)
            if log.mismatch is not None:
                if has_restarted or log.only_once is not None:
                    attempt = _failed_replay(log, attempt)
                    break
                has_restarted = True
                why = f"started again after a crash: {log.mismatch}"
                incidents.append(Incident(IncidentKind.RESTARTED, why))
                log.restart(why=log.mismatch)
                continue
            failure = attempt.retryable_failure
            is_cancelled = context.cancellation is not None and context.cancellation.is_set()
            if failure is None or num_retries == self._retries or is_cancelled:
                break
            if log.only_once is not None:
                attempt = attempt.explained(only_once=log.only_once)
                break
            if not await self._wait_for_retry(job, num_retries, cancellation=context.cancellation):
                break
            num_retries += 1
            incidents.append(retried(failure))
            log.restart(why=failure.error)
        return attempt.noted(incidents)

    async def _wait_for_retry(self, job: Job, number: int, *, cancellation: asyncio.Event | None) -> bool:
        """Wait before a repetition, and return False if the trajectory was cancelled alone in the meantime.

        If all trajectories are cancelled, the repetition starts at once, and ends with `cancelled`.
        """
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(retry_delay_s(number)):
                    await (cancellation or asyncio.Event()).wait()
        except asyncio.CancelledError:
            if not self._was_cancelled_alone(job):
                raise
            return False
        return True

    async def _run_loop(self, job: Job, context: LoopContext, *, log: RowLog) -> Attempt:
        """Run the loop once. Its errors become data; a cancellation of the batch is raised."""
        loop: AgentLoopBase | None = None

        async def run() -> Attempt:
            nonlocal loop
            loop = self._make_loop(job, context)
            returned = await loop.run(dict(job.sampling_params), **copied(dict(job.columns)))
            return self._accepted(returned, loop, job, completions=completions)

        limits = context.limits.with_deadline(job.row.get(TIMEOUT_COLUMN))
        timeout_s = limits.deadline_s
        if timeout_s is not None:
            timeout_s += DEADLINE_GRACE_S + _check_time_s(job.row)
        completions = CompletionMemory()
        decode = context.template.encoder.decode
        try:
            with context.server_manager.scope(
                seed=job.seed, decode=decode, completions=completions
            ) as server_manager:
                context = structs.replace(context, server_manager=server_manager, limits=limits, log=log)
                return await run_bounded(
                    run, timeout_s=timeout_s, name="agent loop", grace_s=loop_grace_s(context)
                )
        except EpisodeStopped as stopped:
            return _record(loop, stopped.reason)
        except asyncio.CancelledError:
            if not self._was_cancelled_alone(job):
                raise
            await _close_abandoned(loop, StopReason.CANCELLED)
            return _record(loop, StopReason.CANCELLED)
        except JournalError:
            raise
        except DeadlineExpired as error:
            if isinstance(error, Abandoned):
                await _close_abandoned(loop, StopReason.DEADLINE)
            return _record(loop, StopReason.DEADLINE)
        except Exception as error:  # noqa: BLE001  (a broken trajectory is data, with its traceback)
            return _record(loop, StopReason.FAILED, failure=failure_of(error))

    def _accepted(
        self, returned: Any, loop: AgentLoopBase, job: Job, *, completions: CompletionMemory
    ) -> Attempt:
        """Validate and complete what a loop returned. An invalid output in a list fails alone."""
        checks = LoopOutputs(self._context, job.row, completions)
        if isinstance(returned, AgentLoopOutput):
            return Attempt.of(checks.accept(returned))
        accepted: list[AgentLoopOutput] = []
        for output in listed_outputs(returned, loop_name=type(loop).__name__):
            try:
                accepted.append(checks.accept(output))
            except Exception as error:  # noqa: BLE001  (as in `_run_loop`)
                failure = failure_of(error)
                accepted.append(AgentLoopOutput(segments=(), stop_reason=StopReason.FAILED, failure=failure))
        return Attempt.of(accepted)

    def _was_cancelled_alone(self, job: Job) -> bool:
        """Return whether only `cancel` cancelled the trajectory."""
        return job.trajectory_id in self._cancelled and self._running[job.trajectory_id].uncancel() == 0

    def _make_loop(self, job: Job, context: LoopContext) -> AgentLoopBase:
        name = str(job.row.get("agent_name") or self._default_agent_loop)
        entry = self._loops.get(name, where="agent_name")
        try:
            return entry.loop_class.from_context(context, **entry.kwargs)
        except TypeError as error:
            raise ConfigError(
                f"agent loop {name!r} does not take the arguments {sorted(entry.kwargs)}: {error}; correct its entry "
                "in rollout.agent.agent_loop_config_path"
            ) from error


def loop_grace_s(context: LoopContext) -> float:
    """Return how long a cancelled loop may take to abort its request, end its calls, and close its tools and
    interaction. Each of these steps has a grace period of its own."""
    close_s = context.multi_turn.close_timeout_s + 2 * ABANDON_GRACE_S
    return FINISH_GRACE_S + 3 * ABANDON_GRACE_S + 2 * close_s


def _check_time_s(row: Row) -> float:
    """Return how long the check of a row's workspace may take after the trajectory's deadline; 0 without a check."""
    try:
        workspace = workspace_mapping(row.get("workspace") or {}, where="workspace")
    except ConfigError:
        return 0.0  # the loop reports it
    check: Any = workspace.get("check")
    if not isinstance(check, Mapping):
        return 0.0
    default: float = CheckSettings.model_fields["timeout_s"].default
    timeout_s = as_finite_number(cast(Mapping[str, Any], check).get("timeout_s", default))
    return (timeout_s or 0.0) + COPY_TIMEOUT_S


async def _close_abandoned(loop: AgentLoopBase | None, reason: StopReason) -> None:
    """Close the tools and the interaction of a loop that was abandoned."""
    if loop is not None and loop.last_episode is not None:
        await loop.last_episode.abandon(reason)


def _record(loop: AgentLoopBase | None, reason: StopReason, *, failure: Failure | None = None) -> Attempt:
    if loop is None:
        return Attempt.of(AgentLoopOutput(segments=(), stop_reason=reason, failure=failure))
    return Attempt.of(loop.unfinished_output(reason, failure=failure))


def _failed_replay(log: RowLog, attempt: Attempt) -> Attempt:
    error = (
        f"{log.mismatch}; the row cannot start again, since {log.only_once} was used, or may have been, and may be "
        "used only once"
    )
    failure = Failure(error=f"ReplayMismatch: {error}", traceback=error)
    return Attempt.of(attempt.outputs[0].failed(failure))


class Workers(Protocol):
    """The workers of a manager: one `AgentLoopWorker`, or several in other processes."""

    async def start(self) -> None:
        """Start the workers. Called once, when the servers are up."""
        ...

    async def run(
        self,
        jobs: Sequence[Job],
        *,
        budget: FailureBudget | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Run each job exactly once, as `AgentLoopWorker.run` does. Nothing is in flight after it returns or raises."""
        ...

    def cancel(self, trajectory_id: str) -> bool:
        """End one trajectory with `cancelled`, its tokens kept. Return whether it was in flight."""
        ...

    def cancel_all(self) -> None:
        """End every trajectory of the present runs, as `AgentLoopWorker.cancel_all` does."""
        ...

    async def set_weight_version(self, weight_version: int) -> None:
        """Set the weight version that the servers have from now on."""
        ...

    async def close(self) -> None:
        """Close the workers."""
        ...
