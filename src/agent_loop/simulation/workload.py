"""What a cluster is given to do: trajectories as turns, lengths and waits for tools."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent_loop.errors import ConfigError


class Turn(NamedTuple):
    """One completion and what follows it."""

    num_tokens: int
    """That the model says."""
    tool_s: float
    """Until the reply is there."""
    num_reply_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One trajectory as it will go, whichever servers it meets."""

    id: str
    group: int
    num_prompt_tokens: int
    turns: tuple[Turn, ...]
    starts: tuple[int, ...] = field(init=False)
    """Tokens of context when each turn begins, and after the last one."""

    def __post_init__(self) -> None:
        grown = accumulate(
            (t.num_tokens + t.num_reply_tokens for t in self.turns), initial=self.num_prompt_tokens
        )
        object.__setattr__(self, "starts", tuple(grown))

    @property
    def num_tokens(self) -> int:
        """That the model says in all turns."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def tool_s(self) -> float:
        """Waits for tools; nothing waits for the one behind the last turn."""
        return sum(turn.tool_s for turn in self.turns[:-1])

    def tokens_left(self, context: int) -> int:
        """What the model has still to say in the turn that a context of so many tokens is in."""
        turn = bisect_right(self.starts, context) - 1
        return self.starts[turn] + self.turns[turn].num_tokens - context


@dataclass(frozen=True, slots=True)
class Spread:
    """A log-normal distribution: half of the draws are below the median; 1 in 6 is above `e ** sigma` medians."""

    median: float
    sigma: float
    at_most: float

    def draw(self, normal: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values that belong to standard normal ones."""
        return np.minimum(self.median * np.exp(self.sigma * normal), self.at_most)


@dataclass(frozen=True, slots=True)
class Workload:
    """Heavy-tailed trajectories: most are short, a few go on until a limit ends them."""

    num_trajectories: int = 100_000
    group_size: int = 8
    """Trajectories of one prompt: they share its length, and in part how long the model speaks."""
    min_turns: int = 2
    turns_tail: float = 1.5
    """Exponent of a Pareto distribution: of `k` times the least number of turns, there are `k ** -turns_tail`."""
    max_turns: int = 40
    prompt_tokens: Spread = Spread(800, 0.6, 8_192)
    turn_tokens: Spread = Spread(300, 1.0, 8_192)
    group_share: float = 0.25
    """Of the variance of `turn_tokens` that a group has in common."""
    reply_tokens: Spread = Spread(150, 1.0, 4_096)
    tool_s: Spread = Spread(0.5, 1.5, 120)
    max_response_tokens: int = 16_384
    """A trajectory ends where its turns and replies reach so many."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_trajectories, self.group_size, self.min_turns) < 1 or self.max_turns < self.min_turns:
            raise ConfigError(
                f"a workload of {self.num_trajectories} trajectories in groups of {self.group_size} with "
                f"{self.min_turns} to {self.max_turns} turns: give at least 1 of each, and turns in order"
            )

    def plans(self) -> list[Plan]:
        """The trajectories; the same seed gives the same ones."""
        random = np.random.default_rng(self.seed)
        num_groups = -(-self.num_trajectories // self.group_size)
        prompts = self.prompt_tokens.draw(random.standard_normal(num_groups)).astype(int)
        in_common = random.standard_normal(num_groups) * np.sqrt(self.group_share)
        numbers = np.minimum(
            self.min_turns * random.random(self.num_trajectories) ** (-1 / self.turns_tail), self.max_turns
        )
        plans: list[Plan] = []
        for number in range(self.num_trajectories):
            group = number // self.group_size
            turns = int(numbers[number])
            own = random.standard_normal(turns) * np.sqrt(1 - self.group_share)
            said = self.turn_tokens.draw(in_common[group] + own).astype(int)
            replies = self.reply_tokens.draw(random.standard_normal(turns)).astype(int)
            waits = self.tool_s.draw(random.standard_normal(turns))
            rows = zip(said.tolist(), waits.tolist(), replies.tolist(), strict=True)
            kept = _within(self.max_response_tokens, rows)
            plans.append(Plan(f"{group}/{number}", group, max(int(prompts[group]), 1), kept))
        return plans


def _within(max_tokens: int, rows: Iterable[tuple[int, float, int]]) -> tuple[Turn, ...]:
    """The turns up to a limit, the last one cut to it."""
    kept: list[Turn] = []
    left = max_tokens
    for num_tokens, tool_s, num_reply_tokens in rows:
        kept.append(Turn(max(min(num_tokens, left), 1), tool_s, max(num_reply_tokens, 1)))
        left -= num_tokens + num_reply_tokens
        if left <= 0:
            break
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Totals:
    """What a workload adds up to."""

    num_trajectories: int
    num_turns: int
    num_tokens: int
    num_prompt_tokens: int
    """That have to be computed at least: prompts and replies."""

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> Totals:
        return cls(
            num_trajectories=len(plans),
            num_turns=sum(len(plan.turns) for plan in plans),
            num_tokens=sum(plan.num_tokens for plan in plans),
            num_prompt_tokens=sum(new_prompt_tokens(plan) for plan in plans),
        )

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def new_prompt_tokens(plan: Plan) -> int:
    """Of the prompt and of the replies that the model reads."""
    return plan.num_prompt_tokens + sum(turn.num_reply_tokens for turn in plan.turns[:-1])
