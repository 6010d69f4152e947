"""Score trajectories: one by one with a reward function, or whole groups with one call of a batch reward function."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from msgspec import structs

from agent_loop.errors import RewardError
from agent_loop.rewards.function import BatchRewardFunction, RewardFunction, Score, ScoreResult
from agent_loop.rollout.failures import FailureBudget, failure_of, retried, retry_delay_s, with_incidents
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.journal import StepJournal
from agent_loop.runtime.activity import WaitKind, waiting_for
from agent_loop.runtime.incidents import IncidentCollector
from agent_loop.trajectory import AgentLoopOutput, Incident, Span, Trajectory
from agent_loop.types import StopReason

ResultT = TypeVar("ResultT")


async def scored(
    output: AgentLoopOutput, job: Job, *, reward: RewardFunction | None, retries: int, branch: int | None
) -> Trajectory:
    """Return the trajectory of an output, scored with its own reward or the reward function.

    A reward function that raises fails the trajectory.
    """
    score: Score | None = None
    incidents: list[Incident] = []

    async def call() -> Score | None:
        if output.reward_score is not None:
            return Score(output.reward_score)
        if reward is None:
            return None
        with waiting_for(WaitKind.REWARD):
            return await reward(output, job.row)

    failed = output
    if output.stop_reason not in (StopReason.FAILED, StopReason.CANCELLED):
        try:
            score = await _repeated(call, retries=retries, on_retry=incidents.append)
        except Exception as error:  # noqa: BLE001  (a broken reward is data too; many of them stop the run)
            failed = output.failed(failure_of(error))
    return Trajectory(
        output=with_incidents(failed, incidents),
        row=job.row,
        group=job.group,
        rollout=job.rollout,
        reward=None if score is None else score.reward,
        reward_extra={} if score is None else score.extra,
        branch=branch,
    )


async def _repeated(
    call: Callable[[], Awaitable[ResultT]], *, retries: int, on_retry: Callable[[Incident], None]
) -> ResultT:
    """Call a reward function, and call it again at most `retries` times if something that it needs was unavailable."""
    for number in range(retries):
        try:
            return await call()
        except Exception as error:
            failure = failure_of(error)
            if not failure.is_retried:
                raise
            on_retry(retried(failure, what="the reward function"))
            await asyncio.sleep(retry_delay_s(number))
    return await call()


class GroupScoring:
    """Scores the trajectories of one run, each group when its last rollout has ended.

    Without a function, trajectories are reported at once. The function does not get trajectories that failed, were
    cancelled, or have a reward of their own. A trajectory that was scored before a crash keeps its reward; the function
    gets it only if others of its group have no reward. A group with a trajectory that can be resumed stays unscored
    until that trajectory has ended in a later run.
    """

    def __init__(
        self,
        reward: BatchRewardFunction | None,
        *,
        jobs: Iterable[Job],
        budget: FailureBudget,
        journal: StepJournal | None,
        on_trajectory: Callable[[Trajectory], None],
        retries: int = 0,
    ) -> None:
        self.trajectories: list[Trajectory] = []
        """Trajectories that were reported."""
        self._retries = retries
        self._reward = reward
        self._sizes = Counter(job.group for job in jobs)
        self._budget = budget
        self._journal = journal
        self._on_trajectory = on_trajectory
        self._groups: defaultdict[int, list[Trajectory]] = defaultdict(list)
        self._complete: set[int] = set()
        self._has_raised = False

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Accept trajectories in the body, and wait at its end until all groups are scored."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                yield
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def add(self, trajectory: Trajectory) -> None:
        """Add a trajectory that has ended. The branches of a rollout are added directly after each other."""
        if self._reward is None:
            self._report([trajectory])
            return
        number = trajectory.group
        group = self._groups[number]
        group.append(trajectory)
        is_complete = len({t.rollout for t in group}) == self._sizes[number]
        if is_complete and number not in self._complete and not self._has_raised:
            self._complete.add(number)
            self._tasks.create_task(
                self._finish(number, self._reward)
            )  # starts when all branches have been added

    def _report(self, trajectories: Sequence[Trajectory]) -> None:
        self.trajectories += trajectories
        for trajectory in trajectories:
            self._on_trajectory(trajectory)

    async def _finish(self, number: int, reward: BatchRewardFunction) -> None:
        """Score a group and report its trajectories."""
        group = sorted(self._groups.pop(number), key=lambda t: (t.rollout, t.branch or 0))
        try:
            if any(map(_lacks_reward, group)) and not any(map(_can_be_resumed, group)):
                await self._score(group, reward)
            self._report(group)
        except BaseException:
            self._has_raised = True  # the task group starts no more tasks
            raise

    async def _results(
        self,
        judged: list[Trajectory],
        *,
        reward: BatchRewardFunction,
        on_retry: Callable[[Incident], None],
    ) -> list[ScoreResult]:
        """Call the reward function, again if something that it needs was unavailable for any of the trajectories."""
        results: list[ScoreResult] = []

        async def call() -> None:
            results.clear()
            results.extend(await reward([t.output for t in judged], [t.row for t in judged]))
            for result in results:
                if result.error is not None and failure_of(result.error).is_retried:
                    raise result.error

        try:
            await _repeated(call, retries=self._retries, on_retry=on_retry)
        except RewardError as error:
            return results or [ScoreResult(error=error) for _ in judged]
        return results

    async def _score(self, group: list[Trajectory], reward: BatchRewardFunction) -> None:
        """Replace the trajectories that lack a reward by scored or failed ones, and record these in the journal."""
        judged = [index for index, trajectory in enumerate(group) if _is_judged(trajectory)]
        clock = asyncio.get_running_loop().time
        started = clock()
        with IncidentCollector(f"group={group[0].group}") as collector:
            results = await self._results(
                [group[index] for index in judged], reward=reward, on_retry=collector.incidents.append
            )
        seconds = clock() - started
        result_of = {
            index: result
            for index, result in zip(judged, results, strict=True)
            if _lacks_reward(group[index])
        }
        for index, result in result_of.items():
            group[index] = _with_result(group[index], result, seconds=seconds)
        first = next(iter(result_of))
        for incident in collector.incidents:
            group[first] = group[first].noted(incident)
        scored = [group[index] for index in result_of]
        if self._journal is not None:
            await self._journal.keep_rewards(scored)
        for trajectory in scored:
            self._budget.count(trajectory)


def _with_result(trajectory: Trajectory, result: ScoreResult, *, seconds: float) -> Trajectory:
    """Return the trajectory scored or failed. Its trace gets the seconds of the call, without the seconds for which it
    waited for other trajectories of its group."""
    output, trace = trajectory.output, trajectory.trace
    if result.error is not None:
        output = output.failed(failure_of(result.error))
    for incident in result.incidents:
        output = output.noted(incident)
    if trace is not None:
        span = Span(WaitKind.REWARD, "", trace.seconds, trace.seconds + seconds)
        trace = structs.replace(trace, seconds=span.end, spans=(*trace.spans, span))
    score = result.score
    return structs.replace(
        trajectory,
        output=output,
        trace=trace,
        reward=None if score is None else score.reward,
        reward_extra={} if score is None else score.extra,
    )


def _is_judged(trajectory: Trajectory) -> bool:
    """Return whether the function gets this trajectory."""
    output = trajectory.output
    return output.stop_reason not in (StopReason.FAILED, StopReason.CANCELLED) and output.reward_score is None


def _lacks_reward(trajectory: Trajectory) -> bool:
    return trajectory.reward is None and _is_judged(trajectory)


def _can_be_resumed(trajectory: Trajectory) -> bool:
    output = trajectory.output
    return output.stop_reason is StopReason.CANCELLED and bool(output.extra_fields.get("is_cancel"))
