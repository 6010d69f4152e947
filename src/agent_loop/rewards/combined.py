"""Rewards that are the weighted sum of several reward functions."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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
from agent_loop.trajectory import AgentLoopOutput, Incident
from agent_loop.types import Row

ResultT = TypeVar("ResultT")
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
        """Return the result of one trajectory, from those of its parts."""
        incidents: list[Incident] = [incident for result in results for incident in result.incidents]
        scores = [result.score for result in results if result.score is not None]
        if len(scores) < len(results):
            error = next(result.error for result in results if result.score is None)
            return ScoreResult(error=error, incidents=incidents)
        try:
            return ScoreResult(_combine(self._parts, scores), incidents=incidents)
        except RewardError as error:
            return ScoreResult(error=error, incidents=incidents)


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
            found = await _caught(name, reward(output, row))
        if isinstance(found, RewardError):
            return ScoreResult(error=found, incidents=collector.incidents)
        return ScoreResult(found, incidents=collector.incidents)

    if isinstance(reward, RewardFunction):
        return await run_together(score(output, row) for output, row in zip(outputs, rows, strict=True))
    results = await _caught(name, reward(outputs, rows))
    if isinstance(results, RewardError):
        return [ScoreResult(error=results) for _ in outputs]
    return [
        result
        if result.error is None
        else ScoreResult(error=_named(name, result.error), incidents=result.incidents)
        for result in results
    ]


async def _caught(name: str, call: Awaitable[ResultT]) -> ResultT | RewardError:
    """Return the result of a part's call, or its error with the name of the part."""
    try:
        return await call
    except RewardError as error:
        return _named(name, error)


def _named(name: str, error: RewardError) -> RewardError:
    named = RewardError(f"part {name!r}: {error}")
    named.__cause__ = error
    return named


def _combine(parts: Mapping[str, Part], scores: Sequence[Score]) -> Score:
    """Return the weighted sum."""
    reward, extra = 0.0, dict[str, Any]()
    for (name, part), score in zip(parts.items(), scores, strict=True):
        reward += part.weight * score.reward
        extra[name] = score.reward
        extra |= {f"{name}.{key}": value for key, value in score.extra.items()}
    if as_reward(reward) is None:
        raise RewardError(f"the sum of {NAME} is {reward}; give smaller weights {REWARD_LIMIT}")
    return Score(reward, extra)
