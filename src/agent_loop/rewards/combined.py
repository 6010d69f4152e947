"""Rewards that are the weighted sum of several reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_loop.config import RewardConfig
from agent_loop.errors import ConfigError, RewardError
from agent_loop.rewards.function import (
    BatchRewardFunction,
    RewardFunction,
    Score,
    ScoreResult,
    load_batch_reward,
    load_reward,
)
from agent_loop.runtime.concurrency import run_together
from agent_loop.runtime.incidents import IncidentCollector, record_incident
from agent_loop.runtime.numeric import REWARD_LIMIT, as_reward
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Row

NAME = "reward.functions"


@dataclass(frozen=True, slots=True)
class Part:
    """A reward function, and the factor of its reward in the sum."""

    reward: RewardFunction | BatchRewardFunction
    weight: float = 1.0


class CombinedReward(RewardFunction):
    """Weighted sum of reward functions that are called at the same time.

    The score has the reward of each part under the name of the part, and other values of a part as `part.value`. The
    time limits are those of the parts.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__(self.__call__, timeout_s=None, name=NAME)
        self._parts = parts

    async def __call__(self, output: AgentLoopOutput, row: Row) -> Score:
        """Score one trajectory."""
        [result] = await CombinedBatchReward(self._parts)([output], [row])
        for incident in result.incidents:
            record_incident(incident.kind, incident.detail)
        if result.score is None:
            raise result.error or RewardError(f"{NAME} returned no score")
        return result.score


class CombinedBatchReward(BatchRewardFunction):
    """Weighted sum of reward functions, for a group of trajectories.

    Batch reward functions among the parts get the whole group, the others each trajectory. The scores are as in
    `CombinedReward`. A failed part leaves only those trajectories unscored for which it failed.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__(self.__call__, timeout_s=None, name=NAME)
        self._parts = parts

    async def __call__(self, outputs: Sequence[AgentLoopOutput], rows: Sequence[Row]) -> list[ScoreResult]:
        """Score a group, in the order of its outputs. The error of a result names the part that failed."""
        by_part = await run_together(
            _results(name, part.reward, outputs, rows) for name, part in self._parts.items()
        )
        return [self._combined(results) for results in zip(*by_part, strict=True)]

    def _combined(self, results: Sequence[ScoreResult]) -> ScoreResult:
        """Return the weighted sum for one trajectory, from the results of its parts."""
        incidents = [incident for result in results for incident in result.incidents]
        reward, extra = 0.0, dict[str, Any]()
        for (name, part), result in zip(self._parts.items(), results, strict=True):
            if result.score is None:
                return ScoreResult(error=result.error, incidents=incidents)
            reward += part.weight * result.score.reward
            extra[name] = result.score.reward
            extra |= {f"{name}.{key}": value for key, value in result.score.extra.items()}
        if as_reward(reward) is None:
            error = RewardError(f"the sum of {NAME} is {reward}; give smaller weights {REWARD_LIMIT}")
            return ScoreResult(error=error, incidents=incidents)
        return ScoreResult(Score(reward, extra), incidents=incidents)


def load_rewards(config: RewardConfig) -> CombinedReward | CombinedBatchReward:
    """Load the parts of `reward.functions`."""
    parts: dict[str, Part] = {}
    for name, part in config.functions.items():
        load = load_batch_reward if part.batch else load_reward
        try:
            parts[name] = Part(load(part.function, timeout_s=config.timeout_s), part.weight)
        except ConfigError as error:
            raise ConfigError(f"{NAME}.{name}: {error}") from error
    return CombinedBatchReward(parts) if config.batch else CombinedReward(parts)


async def _results(
    name: str,
    reward: RewardFunction | BatchRewardFunction,
    outputs: Sequence[AgentLoopOutput],
    rows: Sequence[Row],
) -> list[ScoreResult]:
    """Return the results of one part for a group."""

    async def score(output: AgentLoopOutput, row: Row) -> ScoreResult:
        assert isinstance(reward, RewardFunction)
        with IncidentCollector(name) as collector:
            try:
                found = ScoreResult(await reward(output, row))
            except RewardError as error:
                found = ScoreResult(error=error)
        return replace(found, incidents=collector.incidents)

    if isinstance(reward, RewardFunction):
        results = await run_together(score(output, row) for output, row in zip(outputs, rows, strict=True))
    else:
        try:
            results = await reward(outputs, rows)
        except RewardError as error:
            results = [ScoreResult(error=error)] * len(outputs)
    return [
        result if result.error is None else replace(result, error=_named(name, result.error))
        for result in results
    ]


def _named(name: str, error: RewardError) -> RewardError:
    named = RewardError(f"part {name!r}: {error}")
    named.__cause__ = error
    return named
