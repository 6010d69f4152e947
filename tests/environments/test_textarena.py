"""Games of TextArena, played to their end through the loop of games by random legal players."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import pytest

from agent_loop.checks.solutions import completion_of, solution_template
from agent_loop.environments.factory import EnvironmentFactory
from agent_loop.environments.suite import SolutionTurn
from agent_loop.environments.tasks import parse_task_name, suite_rows
from agent_loop.environments.textarena import NEEDS_DOWNLOAD, TextArenaGame, TextArenaSuite
from agent_loop.errors import DataError
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.rollout.harness import WorkerHarness

pytestmark = pytest.mark.environments

SUITE = TextArenaSuite()
GAMES = {
    "Blackjack-v0": 1,
    "ConnectFour-v0": 2,
    "FrozenLake-v0": 1,
    "GameOfPureStrategy-v0": 2,
    "GuessTheNumber-v0": 1,
    "HighSociety-v0": 2,
    "IndianPoker-v0": 2,
    "IteratedMatchingPennies-v0": 2,
    "IteratedPrisonersDilemma-v0": 2,
    "IteratedRockPaperScissors-v0": 2,
    "KuhnPoker-v0": 2,
    "LiarsDice-v0": 2,
    "Nim-v0": 2,
    "Poker-v0": 2,
    "PublicGoodsGame-v0": 2,
    "QuantumTicTacToe-v0": 2,
    "SecretMafia-v0": 6,
    "Snake-v0": 2,
    "Surround-v0": 2,
    "ThreePlayerIPD-v0": 3,
    "ThreePlayerTicTacToe-v0": 3,
    "TicTacToe-v0": 2,
    "WildTicTacToe-v0": 2,
}
"""Games with their number of players."""


class Watched(TextArenaGame):
    """Game that keeps the last instance."""

    last: Watched


def watched() -> Watched:
    Watched.last = Watched()
    return Watched.last


def rows_of(name: str) -> list[dict[str, Any]]:
    return list(islice(all_rows_of(name), 8))


def all_rows_of(name: str) -> Iterator[dict[str, Any]]:
    return suite_rows(SUITE, parse_task_name(f"textarena:{name}", suite=SUITE))


def play(row: Mapping[str, Any], move: Callable[[ScriptedRequest], str]) -> list[Trajectory]:
    harness = WorkerHarness(
        lambda request: ScriptedReply(completion_of(SolutionTurn(text=move(request)))),
        template=solution_template(),
        environments={"textarena": EnvironmentFactory(watched, where="textarena")},
        prompt_length=2**20,
        response_length=2**20,
    )
    return asyncio.run(harness.worker.run(harness.jobs([row])))


def random_legal(seed: int) -> Callable[[ScriptedRequest], str]:
    """Return a policy that plays random legal moves of the game that is played."""
    rng = random.Random(seed)

    def move(request: ScriptedRequest) -> str:
        game = Watched.last
        seat = game.turn()
        assert seat is not None
        return rng.choice(game.legal_moves(seat))

    return move


@pytest.mark.parametrize("name", GAMES)
def test_random_legal_self_play_ends_with_the_games_own_rewards(name: str) -> None:
    row = rows_of(name)[0]
    trajectories = play(row, random_legal(0))
    state = Watched.last._inner.state
    assert state.done
    assert len(trajectories) == GAMES[name]
    assert {seat: t.reward for seat, t in enumerate(trajectories)} == pytest.approx(state.rewards)
    for trajectory in trajectories:
        assert trajectory.output.failure is None
        assert trajectory.output.stop_reason is StopReason.INTERACTION_FINISHED
    assert not any(info.get("invalid_move") for info in state.game_info.values())


@pytest.mark.parametrize("name", ["ConnectFour-v0", "KuhnPoker-v0", "Nim-v0", "TicTacToe-v0"])
def test_self_play_gives_two_trajectories_with_opposite_rewards(name: str) -> None:
    for seed, row in enumerate(rows_of(name)):
        first, second = play(row, random_legal(seed))
        assert first.reward is not None
        assert second.reward is not None
        assert first.reward == -second.reward
        assert [t.output.extra_fields["seat"] for t in (first, second)] == [0, 1]


@pytest.mark.parametrize("name", ["KuhnPoker-v0", "TicTacToe-v0", "Nim-v0"])
def test_a_random_opponent_plays_every_seat_in_turn_and_legally(name: str) -> None:
    for number, row in enumerate(rows_of(f"{name}?opponent=random")):
        [trajectory] = play(row, random_legal(number))
        assert trajectory.output.extra_fields["seat"] == number % 2
        assert trajectory.reward == Watched.last._inner.state.rewards[number % 2]
        assert not any(info["invalid_move"] for info in Watched.last._inner.state.game_info.values())


def test_a_row_deals_the_same_cards_again_while_other_games_run() -> None:
    [row, other, *_] = rows_of("KuhnPoker-v0?seed=5")
    games = [TextArenaGame() for _ in range(2)]
    deals: list[list[str]] = [[], []]
    for game in games:
        game.reset(row)
    TextArenaGame().reset(other)
    for game, deal in zip(games, deals, strict=True):
        while (seat := game.turn()) is not None:
            deal.append(game.observe(seat))
            random.random()
            game.act(seat, game.legal_moves(seat)[0])
    assert deals[0] == deals[1]
    assert row["raw_prompt"][0]["content"] == deals[0][0]


def test_a_deal_is_in_one_split_whoever_plays_it() -> None:
    splits = ("KuhnPoker-v0?split=train&size=200", "KuhnPoker-v0?split=val&opponent=random&size=20")
    train, val = ({row["task"]["seed"] for row in all_rows_of(name)} for name in splits)
    assert train
    assert val
    assert train.isdisjoint(val)


def test_the_seed_of_a_game_leaves_the_generator_of_the_process_alone() -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    rows_of("KuhnPoker-v0")
    assert random.random() == expected


def test_repeated_invalid_moves_lose_as_the_game_says() -> None:
    first, second = play(rows_of("TicTacToe-v0")[0], lambda request: "I resign")
    assert (first.reward, second.reward) == (-1.0, 1.0)
    assert Watched.last._inner.state.game_info[0]["invalid_move"]


def test_a_seat_that_forfeits_loses() -> None:
    game = TextArenaGame()
    game.reset(rows_of("TicTacToe-v0")[0])
    game.forfeit(0)
    assert game.turn() is None
    assert game.rewards() == {0: -1.0, 1: 1.0}


def test_games_that_download_word_lists_are_refused_with_the_reason() -> None:
    from textarena.envs.registration import ENV_REGISTRY

    refused = {
        name for name, spec in ENV_REGISTRY.items() if spec.entry_point.split(".")[2] in NEEDS_DOWNLOAD
    }
    assert {ENV_REGISTRY[name].entry_point.split(".")[2] for name in refused} == NEEDS_DOWNLOAD
    assert not refused & set(SUITE.tasks())
    for name in sorted(refused):
        with pytest.raises(DataError, match="downloads word lists"):
            rows_of(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Debate-v0", "needs a model behind OpenRouter"),
        ("KuhnPokr-v0", "there is no such game"),
        ("TicTacToe-v0?players=3", "does not start with 3 players"),
    ],
)
def test_other_games_that_cannot_be_played_are_refused(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of(name)
