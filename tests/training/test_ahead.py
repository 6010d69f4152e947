"""Rollouts that run ahead: how many run at once, and how old their weights may be."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.testing import run_virtual
from agent_loop.training.rollouts import RolloutsAhead
from tests.harness import examples


class Trainer:
    """Trainer that consumes rollouts in the order of the steps and updates for a given time after each."""

    def __init__(self, *, max_staleness: int, rollout_s: list[float], update_s: list[float]) -> None:
        self.version = 0
        self.began_at: dict[int, int] = {}
        """Weight version at the start of the rollout of each step."""
        self.num_running = self.most_running = 0
        self._max_staleness = max_staleness
        self._rollout_s = rollout_s
        self._update_s = update_s

    async def roll_out(self, step: int) -> int:
        self.began_at[step] = self.version
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(self._rollout_s[step - 1])
        finally:
            self.num_running -= 1
        return step

    async def train(self) -> None:
        last_step = len(self._rollout_s)
        async with RolloutsAhead(
            self.roll_out, max_staleness=self._max_staleness, last_step=last_step
        ) as ahead:
            for step in range(1, last_step + 1):
                assert await ahead.take(step) == step
                await asyncio.sleep(self._update_s[step - 1])
                self.version = step


seconds = st.floats(0, 30)


@examples(60)
@given(
    max_staleness=st.integers(0, 4),
    lengths=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=12),
)
def test_no_rollout_is_older_than_max_staleness_and_no_step_is_skipped(
    max_staleness: int, lengths: list[tuple[float, float]]
) -> None:
    trainer = Trainer(
        max_staleness=max_staleness,
        rollout_s=[rollout for rollout, _ in lengths],
        update_s=[update for _, update in lengths],
    )

    run_virtual(trainer.train())

    assert sorted(trainer.began_at) == list(range(1, len(lengths) + 1))
    assert trainer.began_at == {step: max(0, step - 1 - max_staleness) for step in trainer.began_at}
    assert trainer.most_running <= max_staleness + 1


@pytest.mark.parametrize(("max_staleness", "seconds_taken"), [(0, 10 * 6.0), (1, 10 * 5.0 + 1.0), (4, 16.0)])
def test_rollouts_that_run_ahead_overlap_with_updates(max_staleness: int, seconds_taken: float) -> None:
    """Run ten rollouts of 5 s and ten updates of 1 s."""
    trainer = Trainer(max_staleness=max_staleness, rollout_s=[5.0] * 10, update_s=[1.0] * 10)

    async def timed() -> float:
        started = asyncio.get_running_loop().time()
        await trainer.train()
        return asyncio.get_running_loop().time() - started

    taken = run_virtual(timed())
    if max_staleness == 0:
        assert taken == pytest.approx(seconds_taken)
    else:
        assert taken < 10 * 6.0


def test_exit_cancels_running_rollouts_and_a_failure_is_raised_at_its_step() -> None:
    ended: list[int] = []

    async def roll_out(step: int) -> int:
        try:
            if step == 2:
                raise ValueError("the rollout of step 2")
            await asyncio.sleep(1.0 if step == 1 else 1000.0)
        finally:
            ended.append(step)
        return step

    async def scenario() -> None:
        async with RolloutsAhead(roll_out, max_staleness=3, last_step=10) as ahead:
            assert await ahead.take(1) == 1
            with pytest.raises(ValueError, match="step 2"):
                await ahead.take(2)
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scenario())
    assert sorted(ended) == [1, 2, 3, 4]  # The rollout of step 5 had not started.
