"""Rewards of whole groups in a journal: recorded rewards are reused, and missing rewards are computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import AgentConfig, RolloutConfig
from agent_loop.rewards.function import BatchRewardFunction
from agent_loop.rollout.journal import open_journal
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import Row, StopReason
from tests.helpers import hermes_template, text_reply, user
from tests.rollout.journaled import facts, key_of

N = 3
ROWS = [{"raw_prompt": user(f"question {n}"), "number": n} for n in range(2)]
LATENCIES = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
"""Of the trajectories, in the order in which they begin: group 0 ends after 3 s, group 1 after 6 s."""
RecordPosition = tuple[int, int]


class Trial:
    """A manager whose samples all differ, and a judge that records its calls."""

    def __init__(
        self,
        *,
        first: int = 0,
        bonus: float = 0.0,
        spoils: Callable[[list[Any]], Any] | None = None,
        hangs_on: int | None = None,
        broken: Sequence[int] = (),
        agent: str = "single_turn_agent",
    ) -> None:
        self.num_requests = 0
        self.judged: list[list[str]] = []
        self._first = first
        self._bonus = bonus
        self._spoils = spoils
        self._hangs_on = hangs_on
        self._broken = broken
        self.manager = AgentLoopManager(
            RolloutConfig(
                n=N, max_failed_share=1.0, agent=AgentConfig(num_workers=2, default_agent_loop=agent)
            ),
            servers=[ScriptedServer(self._answer)],
            template=hermes_template(),
            reward=BatchRewardFunction(self._judge, timeout_s=60, name="judge"),
        )

    def run(
        self, path: Path, *, killed_after_s: float | None = None, resume: bool = True
    ) -> list[Trajectory]:
        """Run the rows with a journal. Return nothing if the run is killed."""

        async def scenario() -> list[Trajectory]:
            async with open_journal(path, key=key_of(ROWS), rows=ROWS, resume=resume) as journal:
                task = asyncio.create_task(self.manager.run(ROWS, journal=journal))
                if killed_after_s is not None:
                    asyncio.get_running_loop().call_later(killed_after_s, task.cancel)
                with suppress(asyncio.CancelledError):
                    return await task
            return []

        return run_virtual(scenario())

    def _answer(self, _: ScriptedRequest) -> ScriptedReply:
        place = self.num_requests
        self.num_requests += 1
        error = "broken" if place in self._broken else None
        return text_reply(str(self._first + place), latency_s=LATENCIES[place], error=error)

    async def _judge(self, outputs: list[AgentLoopOutput], rows: list[Row]) -> Any:
        self.judged.append([output.answer for output in outputs])
        if rows[0]["number"] == self._hangs_on:
            await asyncio.Event().wait()
        rewards: list[Any] = [
            {"reward": float(output.answer) + self._bonus, "of": len(outputs)} for output in outputs
        ]
        return rewards if self._spoils is None else self._spoils(rewards)


def rewards_of(trajectories: Sequence[Trajectory]) -> dict[RecordPosition, float | None]:
    return {(t.group, t.rollout): t.reward for t in trajectories}


def test_a_group_that_was_killed_between_its_end_and_its_reward_is_scored_without_being_run(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    assert Trial(hangs_on=1).run(path, killed_after_s=20) == []

    again = Trial(bonus=100)
    trajectories = again.run(path)

    assert again.num_requests == 0
    assert again.judged == [["3", "4", "5"]]
    assert [t.reward for t in trajectories] == [0.0, 1.0, 2.0, 103.0, 104.0, 105.0]
    assert [t.reward_extra for t in trajectories] == [{"of": 3}] * 6


def test_a_group_that_was_killed_before_it_had_ended_is_scored_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Trial()
    first.run(path, killed_after_s=4.5)
    assert first.judged == [["0", "1", "2"]]

    again = Trial(first=50)
    trajectories = again.run(path)

    assert again.num_requests == 2
    assert again.judged == [["3", "50", "51"]]
    assert [t.reward for t in trajectories] == [0.0, 1.0, 2.0, 3.0, 50.0, 51.0]


def test_a_complete_run_is_replayed_with_its_rewards_and_failures(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    before = Trial(spoils=lambda rewards: [*rewards[:-1], float("nan")]).run(path)
    assert rewards_of(before) == {(0, 0): 0, (0, 1): 1, (0, 2): None, (1, 0): 3, (1, 1): 4, (1, 2): None}

    again = Trial(bonus=100)
    after = again.run(path)

    assert (again.num_requests, again.judged) == (0, [])
    assert [facts(t) for t in after] == [facts(t) for t in before]
    assert [t.output.failure for t in after] == [t.output.failure for t in before]
    assert [t.reward_extra for t in after] == [t.reward_extra for t in before]


def test_a_trajectory_whose_reward_failed_is_scored_again_and_not_run_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    first = Trial(hangs_on=1, spoils=lambda rewards: [rewards[0], "?", rewards[2]])
    first.run(path, killed_after_s=20)

    again = Trial(bonus=100)
    trajectories = again.run(path)

    assert again.num_requests == 0
    assert sorted(again.judged) == [["0", "1", "2"], ["3", "4", "5"]]
    assert [t.reward for t in trajectories] == [0.0, 101.0, 2.0, 103.0, 104.0, 105.0]
    assert {t.output.stop_reason for t in trajectories} == {StopReason.ANSWERED}


def test_a_failed_trajectory_is_run_again_and_the_recorded_rewards_of_its_group_are_kept(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    first = Trial(hangs_on=1, broken=[1])
    first.run(path, killed_after_s=30)
    assert first.judged[0] == ["0", "2"]

    again = Trial(first=50, bonus=100)
    trajectories = again.run(path)

    assert again.num_requests == 1
    assert sorted(again.judged) == [["0", "50", "2"], ["3", "4", "5"]]
    assert [t.reward for t in trajectories] == [0.0, 150.0, 2.0, 103.0, 104.0, 105.0]
    assert [t.reward_extra["of"] for t in trajectories] == [2, 3, 2, 3, 3, 3]


@pytest.mark.parametrize("seconds", [0.5, 2.5, 4.5])
def test_wherever_a_run_is_killed_each_trajectory_gets_one_reward(tmp_path: Path, seconds: float) -> None:
    path = tmp_path / "journal"
    Trial().run(path, killed_after_s=seconds)
    trajectories = Trial(first=50).run(path)
    assert [t.reward for t in trajectories] == [float(t.output.answer) for t in trajectories]
    assert len(trajectories) == 2 * N
