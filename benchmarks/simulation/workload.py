"""Workloads of a simulated cluster: trajectories as turns with token counts and tool times."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent_loop.errors import ConfigError


class PlannedTurn(NamedTuple):
    """One completion and the reply to it."""

    num_tokens: int
    """Number of tokens that the model samples."""
    tool_s: float
    """Seconds until the reply is available."""
    num_reply_tokens: int


@dataclass(frozen=True, slots=True)
class TrajectoryPlan:
    """Predetermined course of one trajectory, independent of the servers that run it."""

    id: str
    group: int
    num_prompt_tokens: int
    turns: tuple[PlannedTurn, ...]
    starts: tuple[int, ...] = field(init=False)
    """Context tokens at the start of each turn, and after the last turn."""

    def __post_init__(self) -> None:
        grown = accumulate(
            (t.num_tokens + t.num_reply_tokens for t in self.turns), initial=self.num_prompt_tokens
        )
        object.__setattr__(self, "starts", tuple(grown))

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the model samples in all turns."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def tool_s(self) -> float:
        """Seconds of all tools, without those after the last turn, which nothing waits for."""
        return sum(turn.tool_s for turn in self.turns[:-1])

    def tokens_left(self, context: int) -> int:
        """Return the number of tokens that the model has left to sample in the turn of a context of this length."""
        turn = bisect_right(self.starts, context) - 1
        return self.starts[turn] + self.turns[turn].num_tokens - context


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal distribution. Half of the draws are below the median; 1 in 6 is above `e ** sigma` medians."""

    median: float
    sigma: float
    at_most: float

    def draw(self, normal: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the values that correspond to standard normal draws."""
        return np.minimum(self.median * np.exp(self.sigma * normal), self.at_most)


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload of heavy-tailed trajectories: most are short, a few run until a limit."""

    num_trajectories: int = 100_000
    group_size: int = 8
    """Trajectories per prompt. They share the prompt length and, in part, the length of the completions."""
    min_turns: int = 2
    turns_tail: float = 1.5
    """Exponent of a Pareto distribution: a share of `k ** -turns_tail` has at least `k * min_turns` turns."""
    max_turns: int = 40
    prompt_tokens: LogNormal = LogNormal(800, 0.6, 8_192)
    turn_tokens: LogNormal = LogNormal(300, 1.0, 8_192)
    group_share: float = 0.25
    """Share of the variance of `turn_tokens` that a group has in common."""
    reply_tokens: LogNormal = LogNormal(150, 1.0, 4_096)
    tool_s: LogNormal = LogNormal(0.5, 1.5, 120)
    max_response_tokens: int = 16_384
    """Limit of the tokens of all turns and replies of a trajectory."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_trajectories, self.group_size, self.min_turns) < 1 or self.max_turns < self.min_turns:
            raise ConfigError(
                f"the workload has {self.num_trajectories} trajectories in groups of {self.group_size} with "
                f"{self.min_turns} to {self.max_turns} turns; give at least 1 of each, and min_turns <= max_turns"
            )

    def plans(self) -> list[TrajectoryPlan]:
        """Return the trajectories. They depend on the seed only."""
        random = np.random.default_rng(self.seed)
        num_groups = -(-self.num_trajectories // self.group_size)
        prompts = self.prompt_tokens.draw(random.standard_normal(num_groups)).astype(int)
        in_common = random.standard_normal(num_groups) * np.sqrt(self.group_share)
        numbers = np.minimum(
            self.min_turns * random.random(self.num_trajectories) ** (-1 / self.turns_tail), self.max_turns
        )
        plans: list[TrajectoryPlan] = []
        for number in range(self.num_trajectories):
            group = number // self.group_size
            turns = int(numbers[number])
            own = random.standard_normal(turns) * np.sqrt(1 - self.group_share)
            sampled = self.turn_tokens.draw(in_common[group] + own).astype(int)
            replies = self.reply_tokens.draw(random.standard_normal(turns)).astype(int)
            waits = self.tool_s.draw(random.standard_normal(turns))
            rows = zip(sampled.tolist(), waits.tolist(), replies.tolist(), strict=True)
            kept = _cut_to_limit(self.max_response_tokens, rows)
            plans.append(TrajectoryPlan(f"{group}/{number}", group, max(int(prompts[group]), 1), kept))
        return plans


def _cut_to_limit(max_tokens: int, rows: Iterable[tuple[int, float, int]]) -> tuple[PlannedTurn, ...]:
    """Return the turns up to a token limit, with the last turn cut."""
    kept: list[PlannedTurn] = []
    left = max_tokens
    for num_tokens, tool_s, num_reply_tokens in rows:
        kept.append(PlannedTurn(max(min(num_tokens, left), 1), tool_s, max(num_reply_tokens, 1)))
        left -= num_tokens + num_reply_tokens
        if left <= 0:
            break
    return tuple(kept)


def new_prompt_tokens(plan: TrajectoryPlan) -> int:
    """Return the number of tokens of the prompt and of the replies that the model reads."""
    return plan.num_prompt_tokens + sum(turn.num_reply_tokens for turn in plan.turns[:-1])
