"""`fork` equals a reference in numpy that works on trajectories, state by state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.config import AlgorithmConfig
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.rollout.forks import FORKED_TURN
from agent_loop.training.advantages.estimate import BatchAdvantages, estimate_batch, load_estimators
from agent_loop.trajectory import Trajectory
from agent_loop.types import Origin
from tests.harness import examples
from tests.training.fakes import PAD
from tests.training.samples import Turn, output_of

WEIGHT, KL = 0.25, 1 / 16
"""Weight of the rewards of turns, and penalty of each trained token; exact in float32."""


@dataclass(frozen=True)
class Path:
    """Turns of a trajectory, or those of a continuation after the fork."""

    reward: float | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Forked:
    main: Path
    continuations: tuple[tuple[int, Path], ...] = ()
    """First turn of its own and path of each continuation."""

    def whole(self, turn: int, path: Path) -> Path:
        return Path(path.reward, self.main.turns[:turn] + path.turns)


rewards = st.sampled_from([0.0, 0.5, 1.0, -2.0, 0.125])
turn = st.tuples(st.integers(1, 3), st.none() | rewards).map(lambda values: Turn(*values))
paths = st.builds(Path, st.none() | rewards, st.lists(turn, max_size=3).map(tuple))
mains = st.builds(Path, st.none() | rewards, st.lists(turn, min_size=1, max_size=4).map(tuple))


@st.composite
def forked_rollouts(draw: st.DrawFn) -> Forked:
    """Draw a rollout. One that was not scored is not forked."""
    main = draw(mains)
    if len(main.turns) < 2 or main.reward is None:
        return Forked(main)
    forks = st.tuples(st.integers(1, len(main.turns) - 1), paths)
    return Forked(main, tuple(draw(st.lists(forks, max_size=5))))


groups = st.lists(st.lists(forked_rollouts(), min_size=1, max_size=4), min_size=1, max_size=3)


def total(path: Path) -> float | None:
    if path.reward is None:
        return None
    return path.reward + sum(WEIGHT * (turn.reward or 0.0) - KL * turn.num_tokens for turn in path.turns)


def reference(groups: Sequence[Sequence[Forked]], *, train: bool) -> dict[tuple[int, int, int], list[float]]:
    """Return the advantage of each turn by group, rollout and branch."""
    found: dict[tuple[int, int, int], list[float]] = {}
    for g, group in enumerate(groups):
        for r, rollout in enumerate(group):
            own = total(rollout.main)
            if own is None:
                continue
            others = [total(other.main) for n, other in enumerate(group) if n != r]
            scored = [each for each in others if each is not None]
            values: dict[int, float] = {0: float(np.mean(scored))} if scored else {}
            of_turn: dict[int, list[float]] = {}
            for turn, path in rollout.continuations:
                reward = total(rollout.whole(turn, path))
                if reward is not None:
                    of_turn.setdefault(turn, []).append(reward)
            values |= {turn: float(np.mean(each)) for turn, each in of_turn.items()}
            values[len(rollout.main.turns)] = own
            found[g, r, 0] = []
            for turn in range(len(rollout.main.turns)):
                before = max((state for state in values if state <= turn), default=None)
                after = min(state for state in values if state > turn)
                found[g, r, 0].append(0.0 if before is None else values[after] - values[before])
            for b, (turn, path) in enumerate(rollout.continuations, 1):
                reward = total(rollout.whole(turn, path))
                if reward is not None:
                    rivals = [*of_turn[turn], own]
                    rivals.remove(reward)
                    advantage = reward - float(np.mean(rivals)) if train else 0.0
                    found[g, r, b] = [0.0] * turn + [advantage] * len(path.turns)
    return found


def trajectories_of(groups: Sequence[Sequence[Forked]]) -> list[Trajectory]:
    mains: list[Trajectory] = []
    branches: list[Trajectory] = []
    for g, group in enumerate(groups):
        for r, rollout in enumerate(group):
            number, main = 0 if rollout.continuations else None, rollout.main
            first = output_of(main.turns, group=g)
            mains.append(Trajectory(first, {}, g, r, main.reward, {}, number))
            for b, (turn, path) in enumerate(rollout.continuations, 1):
                turns = rollout.whole(turn, path).turns
                output = output_of(turns, group=g, shares=(first, turn), **{FORKED_TURN: turn})
                branches.append(Trajectory(output, {}, g, r, path.reward, {}, b))
    return [*mains, *branches]


def estimated(
    groups: Sequence[Sequence[Forked]], *, train: bool = True
) -> tuple[list[Trajectory], RolloutBatch, BatchAdvantages]:
    settings = {"adv_estimator": "fork", "turn_reward_weight": WEIGHT, "kl_reward_coef": 1.0}
    config = AlgorithmConfig.model_validate({**settings, "fork": {"train": train}})
    trajectories = trajectories_of(groups)
    batch = assemble(trajectories, pad_token_id=PAD)
    kl_BR = KL * batch["response_mask"]
    found = estimate_batch(batch, estimators=load_estimators(config), response_length=99, kl_BR=kl_BR)
    return trajectories, batch, found


@pytest.mark.parametrize("train", [True, False])
@examples(150)
@given(groups=groups)
def test_a_stretch_gets_the_next_value_minus_the_last_one(train: bool, groups: list[list[Forked]]) -> None:
    expected = reference(groups, train=train)

    trajectories, batch, found = estimated(groups, train=train)

    for row, trajectory in enumerate(trajectories):
        values = expected.get((trajectory.group, trajectory.rollout, trajectory.branch or 0))
        group = [total(rollout.main) for rollout in groups[trajectory.group]]
        is_compared = not trajectory.branch and len({each for each in group if each is not None}) > 1
        has_credit = values is not None and any(abs(each) > 1e-9 for each in _trained(values, trajectory))
        assert bool(found.has_signal_B[row]) == (values is not None and (is_compared or has_credit))
        turn, place = -1, 0
        for segment in trajectory.output.response_segments:
            turn += segment.origin is Origin.MODEL
            for _ in range(len(segment)):
                if (
                    values is not None
                    and segment.origin is Origin.MODEL
                    and batch["response_mask"][row, place]
                ):
                    advantage = float(found.advantages_BR[row, place])
                    assert advantage == pytest.approx(values[turn], abs=1e-6), (trajectory, turn)
                place += 1


def _trained(values: Sequence[float], trajectory: Trajectory) -> Sequence[float]:
    return values[int(trajectory.output.extra_fields.get(FORKED_TURN, 0)) :]


def test_shared_tokens_are_trained_once_and_those_of_a_continuation_in_its_own_row() -> None:
    rollout = Forked(Path(1.0, (Turn(2), Turn(1))), ((1, Path(0.0, (Turn(3),))),))
    _, batch, found = estimated([[rollout, Forked(Path(0.0, (Turn(1),)))]])
    assert batch["response_mask"].tolist() == [
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 1],
    ]
    assert found.keep_B.all()
