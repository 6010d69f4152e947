"""Score trajectories one by one, with the loop's own reward or the reward function."""

from __future__ import annotations

from functools import partial

from agent_loop.rewards.function import RewardFunction, Score
from agent_loop.rollout.failures import failure_of
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.retries import repeated_reward, with_incidents
from agent_loop.runtime.activity import WaitKind, waiting_for
from agent_loop.trajectory import AgentLoopOutput, Incident, Trajectory
from agent_loop.types import StopReason


class Scoring:
    """Scores the outputs of a worker's loops.

    Args:
        reward: Scores outputs that have no reward of their own. None leaves those unscored.
        retries: How often the reward function is called again because something was unavailable.
    """

    def __init__(self, reward: RewardFunction | None, *, retries: int) -> None:
        self._reward = reward
        self._retries = retries

    async def scored(self, output: AgentLoopOutput, job: Job, *, branch: int | None = None) -> Trajectory:
        """Score an output. A reward function that raises fails the trajectory."""
        score: Score | None = None
        incidents: list[Incident] = []
        call = partial(self._score, output, job)
        try:
            score = await repeated_reward(call, retries=self._retries, on_retry=incidents.append)
        except Exception as error:  # noqa: BLE001  (a broken reward is data too; many of them stop the run)
            output = output.failed(failure_of(error))
        return Trajectory(
            output=with_incidents(output, incidents),
            row=job.row,
            group=job.group,
            rollout=job.rollout,
            reward=None if score is None else score.reward,
            reward_extra={} if score is None else score.extra,
            branch=branch,
        )

    async def _score(self, output: AgentLoopOutput, job: Job) -> Score | None:
        if output.stop_reason in (StopReason.FAILED, StopReason.CANCELLED):
            return None
        if output.reward_score is not None:
            return Score(output.reward_score)
        if self._reward is None:
            return None
        with waiting_for(WaitKind.REWARD):
            return await self._reward(output, job.row)
