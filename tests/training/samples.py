"""Trajectories of several turns, and statistics of groups in numpy float64 as references of estimators."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.trajectory import AgentLoopOutput, Feedback, Segment, Trajectory
from agent_loop.types import Origin, as_token_ids
from tests.training.fakes import PAD

EPS = 1e-6


class Turn(NamedTuple):
    num_tokens: int = 1
    reward: float | None = None
    seen: int = 6
    """Token of the observation before the turn; the first turn of a row has none."""
    state: Any = None
    """State after the turn."""


@dataclass(frozen=True)
class Branch:
    reward: float | None = 0.0
    turns: tuple[Turn, ...] = (Turn(),)
    parts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seat: int | None = None


@dataclass(frozen=True)
class Rollout:
    branches: tuple[Branch, ...]
    shared: tuple[Turn, ...] = ()
    """First turns of all branches."""
    source: str | None = None


class Sample(NamedTuple):
    """One row with the facts that the references work on."""

    trajectory: Trajectory
    branch: Branch
    turns: tuple[Turn, ...]
    num_untrained: int
    """Number of the first turns, which an earlier branch trains."""

    @property
    def group(self) -> tuple[int, int | None]:
        return self.trajectory.group, self.branch.seat

    @property
    def rollout(self) -> Hashable:
        return *self.group, self.trajectory.rollout

    @property
    def is_scored(self) -> bool:
        return self.branch.reward is not None

    @property
    def reward(self) -> float:
        assert self.branch.reward is not None
        return float(np.float32(self.branch.reward))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last response token of each turn."""
        found: list[tuple[int, int]] = []
        end = -1
        for number, turn in enumerate(self.turns):
            start = end + (3 if number else 1)
            end = start + turn.num_tokens - 1
            found.append((start, end))
        return found


rewards = st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0])
states = st.sampled_from([None, 1, "a"])
turn = st.builds(Turn, st.integers(1, 3), st.none() | rewards, st.integers(6, 8), states)
turns = st.lists(turn, max_size=3).map(tuple)
parts = st.fixed_dictionaries({}, optional={"correct": st.none() | rewards, "format": rewards})
branches = st.builds(Branch, st.none() | rewards, turns, parts, st.none() | st.integers(0, 1))
rollouts = st.builds(
    Rollout,
    st.lists(branches, min_size=1, max_size=3).map(tuple),
    turns,
    st.none() | st.sampled_from(["math", "code"]),
)
groups = st.lists(st.lists(rollouts, min_size=1, max_size=4), min_size=1, max_size=3)
"""Groups of one to four rollouts, with one to three branches, some of them unscored or without a response token."""


def samples_of(groups: Sequence[Sequence[Rollout]]) -> list[Sample]:
    found: list[Sample] = []
    for g, group in enumerate(groups):
        for r, rollout in enumerate(group):
            row = {} if rollout.source is None else {"data_source": rollout.source}
            first, is_trained = output_of(rollout.shared, group=g), False
            for b, branch in enumerate(rollout.branches):
                number = b if len(rollout.branches) > 1 else None
                turns = rollout.shared + branch.turns
                fields = {} if branch.seat is None else {"seat": branch.seat}
                output = output_of(turns, group=g, shares=(first, len(rollout.shared)), **fields)
                trajectory = Trajectory(output, row, g, r, branch.reward, branch.parts, number)
                found.append(Sample(trajectory, branch, turns, len(rollout.shared) if is_trained else 0))
                is_trained |= number is not None and branch.reward is not None
    return found


def output_of(
    turns: Sequence[Turn], *, group: int, shares: tuple[AgentLoopOutput, int] | None = None, **fields: Any
) -> AgentLoopOutput:
    """Return turns with an observation of two tokens between them, and feedback at their ends.

    `shares` is another output of the rollout, and the number of turns that the two have in common.
    """
    other, num_shared = shares or (None, 0)
    segments = [Segment(as_token_ids([3, 4 + group]), Origin.PROMPT)]
    if other is not None and num_shared:
        segments = list(other.segments[: 2 * num_shared])
    feedback: list[Feedback] = []
    for number, turn in enumerate(turns):
        if number >= num_shared:
            logprobs = np.full(turn.num_tokens, -1.0, np.float32)
            observation = [Segment(as_token_ids([turn.seen] * 2), Origin.TOOL)] if number else []
            segments += [
                *observation,
                Segment(as_token_ids([5] * turn.num_tokens), Origin.MODEL, logprobs, 0),
            ]
        if turn.reward is not None or turn.state is not None:
            end = sum(map(len, segments[1 : 2 * number + 2])) - 1
            extra = {} if turn.state is None else {"state": turn.state}
            feedback.append(Feedback(Origin.TOOL, "tool", place=end, reward=turn.reward, extra=extra))
    return AgentLoopOutput(segments=segments, feedback=feedback, extra_fields=fields)


def batch_of(samples: Sequence[Sample]) -> RolloutBatch:
    return assemble([sample.trajectory for sample in samples], pad_token_id=PAD)


def compared(
    values: Sequence[float],
    *,
    keys: Sequence[Hashable],
    weights: Sequence[float],
    norm_by_std: bool = True,
    needs_others: bool = True,
) -> list[float]:
    """Return each value minus the weighted mean of its key, divided by the standard deviation.

    With `needs_others`, the result is 0 for a key whose weights sum to 1.
    """
    found: list[float] = []
    for value, key in zip(values, keys, strict=True):
        rows = [n for n, other in enumerate(keys) if other == key]
        chosen, shares = (np.array([each[n] for n in rows], np.float64) for each in (values, weights))
        total = shares.sum()
        if (needs_others and total < 1 + EPS) or chosen.min() == chosen.max():
            found.append(0.0)
            continue
        mean = (shares * chosen).sum() / total
        deviation = np.sqrt((shares * (chosen - mean) ** 2).sum() / max(total - 1, 1))
        found.append(float((value - mean) / (deviation + EPS if norm_by_std else 1.0)))
    return found


def shares(keys: Sequence[Hashable]) -> list[float]:
    """Return 1 divided by the number of rows with the same key, for each row."""
    return [1 / keys.count(key) for key in keys]
