"""Forks: new continuations of finished trajectories, from states in their middle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

import numpy as np
from msgspec import structs

from agent_loop.config.training import ForkConfig
from agent_loop.errors import ConfigError, DataError
from agent_loop.loops.base import LoopContext
from agent_loop.recording.recorded_responses import RecordedResponses, extract_responses
from agent_loop.runtime.instances import OnReplay
from agent_loop.token_chunks import FORCED
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import FloatArray, Origin, Row, StopReason

FORKED_TURN = "forked_turn"
"""Key of `extra_fields` of a continuation: the first turn, from 0, that the trajectory it forks does not share."""


@dataclass(frozen=True, slots=True)
class Fork:
    """State of a trajectory before one of its turns, from which continuations are sampled."""

    trajectory: Trajectory
    turn: int
    """The turn, from 0."""
    recorded: RecordedResponses
    """Responses before the turn."""
    label: str
    """Label of the run that sampled the trajectory."""
    group: int
    """Group of the trajectory in that run."""

    @property
    def shared(self) -> tuple[Segment, ...]:
        """Segments before the turn."""
        segments = self.trajectory.output.segments
        start = _turns(self.trajectory.output)[self.turn][0]
        return segments[: next(n for n, segment in enumerate(segments) if segment is start)]

    @property
    def identity(self) -> Row:
        """Values that, with the weights, determine the continuations: the row, and the tokens before the fork."""
        return {
            "row": dict(self.trajectory.row),
            "rollout": self.trajectory.rollout,
            "tokens": [segment.token_ids for segment in self.shared],
        }


def find_forks(
    trajectories: Iterable[Trajectory], *, config: ForkConfig, origin: Callable[[int], tuple[str, int]]
) -> tuple[list[Fork], list[str]]:
    """Return the states to continue from, in the order of the trajectories, and why other trajectories have none.

    Trajectories that were not scored and trajectories of one turn have no states, which needs no reason.

    Args:
        trajectories: Finished trajectories.
        config: Choice of the states.
        origin: Returns the label of the run that sampled a group, and the number of the group in that run.
    """
    forks: list[Fork] = []
    reasons: list[str] = []
    for trajectory in trajectories:
        output = trajectory.output
        has_ended = output.stop_reason not in (StopReason.FAILED, StopReason.CANCELLED)
        if trajectory.reward is None or not has_ended or output.num_assistant_turns < 2:
            continue
        try:
            recorded = extract_responses(trajectory)
        except DataError as error:
            reasons.append(str(error))
            continue
        label, group = origin(trajectory.group)
        forks += [
            Fork(trajectory, turn, recorded.before(turn + 1), label, group)
            for turn in chosen_states(output, config)
        ]
    return forks, reasons


def chosen_states(output: AgentLoopOutput, config: ForkConfig) -> list[int]:
    """Return the turns before which a trajectory is continued anew, from 0, in order."""
    turns = _turns(output)
    if config.choice == "every":
        chosen = list(range(config.every, len(turns), config.every))
    else:
        first = 0 if config.both_sides else 1  # the group gives the value of the state before the first turn
        by_surprise = sorted(range(first, len(turns)), key=lambda turn: -_surprise(turns[turn]))
        chosen = by_surprise[: config.max_turns]
    states = {turn for turn in chosen if turn > 0}
    if config.both_sides:
        states |= {turn + 1 for turn in chosen if turn + 1 < len(turns)}
    return sorted(states)


def as_branches(
    forks: Sequence[Fork], continuations: Iterable[Trajectory], *, first_branch: int = 1
) -> list[Trajectory]:
    """Return continuations as branches of the rollouts that they fork, which share the segments before the fork.

    Continuations that were not scored, or whose tokens before the fork differ, are left out.

    Args:
        forks: The forks. The group of a continuation is the index of its fork.
        continuations: Continuations, in the order of the forks.
        first_branch: Number of the first branch of a rollout.
    """
    num_branches: dict[tuple[int, int], int] = {}
    branches: list[Trajectory] = []
    for continuation in continuations:
        fork = forks[continuation.group]
        if continuation.reward is None or not _has_prefix(continuation.output.segments, fork.shared):
            continue
        rollout = fork.trajectory.group, fork.trajectory.rollout
        number = num_branches[rollout] = num_branches.get(rollout, first_branch - 1) + 1
        segments = (*fork.shared, *continuation.output.segments[len(fork.shared) :])
        output = replace(continuation.output, segments=segments).with_extra_fields({FORKED_TURN: fork.turn})
        branches.append(
            structs.replace(continuation, output=output, group=rollout[0], rollout=rollout[1], branch=number)
        )
    return branches


def own_segments(fork: Fork, continuation: Trajectory) -> list[Segment]:
    """Return the segments that the model sampled for a continuation, without those that it replayed."""
    segments = continuation.output.segments[len(fork.shared) :]
    return [segment for segment in segments if segment.origin is Origin.MODEL]


def refuse_forks(context: LoopContext, *, has_batch_reward: bool) -> None:
    """Raise an error if continuations from the middle of trajectories would be wrong with these components."""
    remedy = "or choose another algorithm.adv_estimator"
    if has_batch_reward:
        raise ConfigError(
            "algorithm.adv_estimator forks trajectories, and reward.batch compares the trajectories of a group, so "
            "that rewards of continuations cannot be compared with theirs; give a reward function of one trajectory, "
            f"{remedy}"
        )
    declared = {f"tool {name!r}": tool.on_replay for name, tool in context.tools.items()}
    declared |= {f"interaction {name!r}": each.on_replay for name, each in context.interactions.items()}
    for what, on_replay in declared.items():
        if OnReplay(on_replay) in (OnReplay.RESTART, OnReplay.ONCE):
            raise ConfigError(
                f"algorithm.adv_estimator forks trajectories, and {what} has on_replay={str(on_replay)!r}, so that "
                "its state in the middle of a trajectory cannot be restored; set on_replay to 'rerun' or 'recorded' if "
                f"that is right for it, {remedy}"
            )


def _turns(output: AgentLoopOutput) -> list[list[Segment]]:
    """Return the segments of each assistant turn."""
    runs = groupby(output.response_segments, key=lambda segment: segment.origin is Origin.MODEL)
    return [list(segments) for is_model, segments in runs if is_model]


def _surprise(turn: Sequence[Segment]) -> float:
    """Return the mean negative log-prob of the sampled tokens of a turn, in nats; 0 without such tokens."""
    if any(segment.logprobs is None for segment in turn):
        raise DataError(
            "algorithm.fork.choice is 'uncertain', which needs the log-probs of sampled tokens, and the server gave "
            "none; set algorithm.fork.choice=every"
        )
    logprobs = np.concatenate([cast(FloatArray, segment.logprobs) for segment in turn])
    forced = [segment.extras.get(FORCED, np.zeros(len(segment), np.uint8)) for segment in turn]
    sampled = logprobs[np.concatenate(forced) == 0]
    return -float(sampled.mean(dtype=np.float64)) if len(sampled) else 0.0


def _has_prefix(segments: Sequence[Segment], prefix: Sequence[Segment]) -> bool:
    return len(segments) >= len(prefix) and all(
        segment.origin is other.origin and np.array_equal(segment.token_ids, other.token_ids)
        for segment, other in zip(segments, prefix, strict=False)
    )
