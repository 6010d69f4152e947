"""The worker: runs agent loops concurrently, and returns a trajectory for each, however the loop ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from msgspec import structs

from agent_loop.episode import EpisodeStopped
from agent_loop.episode.cancellation import FINISH_GRACE_S
from agent_loop.episode.turn_log import NoTurnLog, TurnLog
from agent_loop.errors import ConfigError, JournalError
from agent_loop.loops.base import AgentLoopBase, LoopContext
from agent_loop.loops.registry import LoopRegistry
from agent_loop.recording.replay_log import ReplayLog
from agent_loop.recording.row_log import RowLog
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.failures import FailureBudget, failure_of
from agent_loop.rollout.gate import AdmissionGate
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.loop_outputs import LoopOutputs, listed_outputs
from agent_loop.rollout.monitor import TrajectoryMonitor, timed
from agent_loop.rollout.retries import (
    noted_first,
    retried,
    retryable_failure,
    wait_for_retry,
    without_retry,
)
from agent_loop.rollout.rows import TIMEOUT_COLUMN
from agent_loop.rollout.scoring import Scoring
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
        self._scoring = Scoring(reward, retries=retries)
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

        Args:
            jobs: The trajectories to run.
            budget: Limit of failed trajectories. None means no limit.
            on_trajectory: Called with each trajectory as it ends.

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
                outputs = await self._run_attempts(job, context)
            finally:
                del self._running[trajectory_id]
                self._cancelled.discard(trajectory_id)
            if isinstance(outputs, AgentLoopOutput):
                trajectories = [await self._scoring.scored(outputs, job)]
            else:
                trajectories = await run_together(
                    self._scoring.scored(output, job, branch=n) for n, output in enumerate(outputs)
                )
        for incident in notes.incidents:
            trajectories[0] = trajectories[0].noted(incident)
        if job.log is not None:
            with waiting_for(WaitKind.JOURNAL):
                await job.log.end(trajectories)
        return trajectories

    async def _run_attempts(self, job: Job, context: LoopContext) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run the loop, and run it again while infrastructure fails it, at most `retries` times."""
        unkept = NoTurnLog()
        incidents: list[Incident] = []
        while True:
            number = len(incidents)
            outputs = await self._run_loop(job, context, unkept=unkept)
            if job.log is not None and job.log.mismatch is not None:
                outputs = await self._restart(job, job.log, outputs, context=context)
            failure = retryable_failure(outputs)
            if failure is None or number == self._retries or _is_cancelled(context):
                return noted_first(outputs, incidents)
            only_once = unkept.only_once if job.log is None else job.log.only_once
            if only_once is not None:
                return noted_first(without_retry(outputs, only_once=only_once), incidents)
            if not await self._waited(number, job, context):
                return noted_first(outputs, incidents)
            if job.log is not None:
                job.log.restart(why=failure.error)
            incidents.append(retried(failure))

    async def _waited(self, number: int, job: Job, context: LoopContext) -> bool:
        """Wait before a repetition, and return False if the trajectory was cancelled alone in the meantime.

        If all trajectories are cancelled, the repetition starts at once, and ends with `cancelled`.
        """
        try:
            await wait_for_retry(number, cancellation=context.cancellation)
        except asyncio.CancelledError:
            if not self._was_cancelled_alone(job):
                raise
            return False
        return True

    async def _restart(
        self,
        job: Job,
        log: RowLog,
        outputs: AgentLoopOutput | list[AgentLoopOutput],
        *,
        context: LoopContext,
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run the row from its prompt again, since the record from before a crash does not match the replay.

        Fail the row if it used something that may be used only once.
        """
        why = log.mismatch or ""
        if log.only_once is not None:
            return _failed_replay(log, outputs)
        log.restart(why=why)
        outputs = await self._run_loop(job, context)
        if log.mismatch is not None:
            return _failed_replay(log, outputs)
        incident = Incident(IncidentKind.RESTARTED, f"started again after a crash: {why}")
        if isinstance(outputs, AgentLoopOutput):
            return outputs.noted(incident)
        return [output.noted(incident) for output in outputs]

    async def _run_loop(
        self, job: Job, context: LoopContext, *, unkept: NoTurnLog | None = None
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run the loop and return its outputs. Its errors become data; a cancellation of the batch is raised.

        Args:
            job: The trajectory to run.
            context: Context of the loop.
            unkept: Log of the episodes if no journal is kept.
        """
        loop: AgentLoopBase | None = None

        async def run() -> AgentLoopOutput | list[AgentLoopOutput]:
            nonlocal loop
            loop = self._make_loop(job, context)
            returned = await loop.run(dict(job.sampling_params), **copied(dict(job.columns)))
            return self._accepted(returned, loop, job, completions=completions)

        limits = context.limits.with_deadline(job.row.get(TIMEOUT_COLUMN))
        context = structs.replace(context, limits=limits)
        deadline_s = limits.deadline_s
        new_log: Callable[[], TurnLog] | None
        if job.recorded is not None:
            new_log = ReplayLog(job.job_id, job.recorded, continue_live=True).new_episode
        elif job.log is not None:
            new_log = job.log.new_episode
        else:
            new_log = None if unkept is None else lambda: unkept
        completions = CompletionMemory()
        try:
            decode = context.template.encoder.decode
            with context.server_manager.scope(seed=job.seed, decode=decode) as server_manager:
                context = context.of_trajectory(server_manager, new_log=new_log, completions=completions)
                return await run_bounded(
                    run,
                    timeout_s=None
                    if deadline_s is None
                    else deadline_s + DEADLINE_GRACE_S + _check_time_s(job.row),
                    name="agent loop",
                    grace_s=loop_grace_s(context),
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
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Validate and complete what a loop returned. An invalid output in a list fails alone.

        Raises:
            EpisodeError: The loop did not return outputs, or its only output is invalid.
        """
        checks = LoopOutputs(self._context, job.row, completions)
        if isinstance(returned, AgentLoopOutput):
            return checks.accept(returned)
        accepted: list[AgentLoopOutput] = []
        for output in listed_outputs(returned, loop_name=type(loop).__name__):
            try:
                accepted.append(checks.accept(output))
            except Exception as error:  # noqa: BLE001  (as in `_run_loop`)
                failed = AgentLoopOutput(
                    segments=(), stop_reason=StopReason.FAILED, failure=failure_of(error)
                )
                accepted.append(failed)
        return accepted

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


def _is_cancelled(context: LoopContext) -> bool:
    return context.cancellation is not None and context.cancellation.is_set()


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


def _record(
    loop: AgentLoopBase | None, reason: StopReason, *, failure: Failure | None = None
) -> AgentLoopOutput | list[AgentLoopOutput]:
    if loop is None:
        return AgentLoopOutput(segments=(), stop_reason=reason, failure=failure)
    return loop.unfinished_output(reason, failure=failure)


def _failed_replay(log: RowLog, outputs: AgentLoopOutput | list[AgentLoopOutput]) -> AgentLoopOutput:
    error = (
        f"{log.mismatch}; the row cannot start again, since {log.only_once} was used, or may have been, and may be "
        "used only once"
    )
    output = outputs if isinstance(outputs, AgentLoopOutput) else outputs[0]
    return output.failed(Failure(error=f"ReplayMismatch: {error}", traceback=error))
