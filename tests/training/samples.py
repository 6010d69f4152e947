"""Trajectories of several turns, and statistics of groups in numpy float64 as references of estimators."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from msgspec import structs

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
    def group(self) -> Hashable:
        return self.trajectory.group, self.branch.seat

    @property
    def rollout(self) -> Hashable:
        """Key of the rollout among those of its group; a row without a branch number is a rollout of its own."""
        t = self.trajectory
        return t.group, self.branch.seat, t.rollout

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
turns = st.lists(
    st.builds(
        Turn, st.integers(1, 3), st.none() | rewards, st.integers(6, 8), st.sampled_from([None, 1, "a"])
    ),
    max_size=3,
).map(tuple)
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
            prompt = Segment(as_token_ids([3, 4 + g]), Origin.PROMPT)
            shared = _segments(rollout.shared, is_first=True)
            is_trained = False
            for b, branch in enumerate(rollout.branches):
                number = b if len(rollout.branches) > 1 else None
                all_turns = rollout.shared + branch.turns
                own = _segments(branch.turns, is_first=not rollout.shared)
                row = {} if rollout.source is None else {"data_source": rollout.source}
                sample = Sample(
                    Trajectory(
                        AgentLoopOutput(
                            segments=[prompt, *shared, *own],
                            extra_fields={} if branch.seat is None else {"seat": branch.seat},
                        ),
                        row=row,
                        group=g,
                        rollout=r,
                        reward=branch.reward,
                        reward_extra=branch.parts,
                        branch=number,
                    ),
                    branch,
                    all_turns,
                    len(rollout.shared) if is_trained else 0,
                )
                found.append(_with_feedback(sample))
                is_trained |= number is not None and branch.reward is not None
    return found


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


def _segments(turns: Sequence[Turn], *, is_first: bool) -> list[Segment]:
    segments: list[Segment] = []
    for number, turn in enumerate(turns):
        if number or not is_first:
            segments.append(Segment(as_token_ids([turn.seen] * 2), Origin.TOOL))
        logprobs = np.full(turn.num_tokens, -1.0, np.float32)
        segments.append(Segment(as_token_ids([5] * turn.num_tokens), Origin.MODEL, logprobs, 0))
    return segments


def _with_feedback(sample: Sample) -> Sample:
    feedback = [
        Feedback(
            Origin.TOOL,
            "tool",
            place=end,
            reward=turn.reward,
            extra={} if turn.state is None else {"state": turn.state},
        )
        for turn, (_, end) in zip(sample.turns, sample.spans, strict=True)
        if turn.reward is not None or turn.state is not None
    ]
    output = sample.trajectory.output
    output = AgentLoopOutput(
        segments=output.segments, feedback=feedback, extra_fields=dict(output.extra_fields)
    )
    return sample._replace(trajectory=structs.replace(sample.trajectory, output=output))
