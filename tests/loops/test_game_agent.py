"""Games of several players: trajectories of seats, opponents, forfeits, failures and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from agent_loop.environments.base import Environment
from agent_loop.environments.factory import EnvironmentFactory
from agent_loop.environments.game import Game
from agent_loop.environments.players import PlayerTurn
from agent_loop.errors import DataError, EnvironmentUnavailable
from agent_loop.loops.base import LoopContext
from agent_loop.loops.game_agent import GameAgentLoop
from agent_loop.loops.registry import register
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.trajectory import FailureKind, Trajectory
from agent_loop.types import StopReason
from tests.helpers import hermes_template, roles, text_reply, user
from tests.interactions.conversations import alternating
from tests.interactions.endpoint import Endpoint, endpoint
from tests.rollout.harness import WorkerHarness, error_of


class Auction(Game):
    """Seats name numbers in turns, for two rounds. The highest sum wins. A seat that names none, or forfeits, loses."""

    made: list[Auction]

    def __init__(self) -> None:
        self.is_closed = False
        Auction.made.append(self)

    def reset(self, row: Mapping[str, Any]) -> int:
        self.row = row
        num_seats = row.get("num_seats", 2)
        self.sums = [0] * num_seats
        self.news = [f"You are seat {seat}. Name a number." for seat in range(num_seats)]
        self.left = [seat for _ in range(2) for seat in range(num_seats)]
        self.loser: int | None = None
        return num_seats

    async def turn(self) -> int | None:
        return None if self.loser is not None or not self.left else self.left[0]

    def observe(self, seat: int) -> str:
        if self.row.get("fails") == len(self.left):
            raise EnvironmentUnavailable("the table is gone")
        news, self.news[seat] = self.news[seat], ""
        return news

    def act(self, seat: int, text: str) -> None:
        assert seat == self.left.pop(0)
        if not text.isdigit():
            self.loser = seat
            return
        self.sums[seat] += int(text)
        for other in range(len(self.sums)):
            if other != seat:
                self.news[other] += f" Seat {seat} says {text}."

    def forfeit(self, seat: int) -> None:
        self.loser = seat

    def rewards(self) -> dict[int, float]:
        if self.loser is not None:
            return {seat: -1.0 if seat == self.loser else 1.0 for seat in range(len(self.sums))}
        return {seat: 1.0 if total == max(self.sums) else -1.0 for seat, total in enumerate(self.sums)}

    def legal_moves(self, seat: int) -> list[str]:
        return ["1", "2", "3"]

    def close(self) -> None:
        self.is_closed = True


class Endless(Auction):
    def turn(self) -> int | None:  # type: ignore[override]
        return 0

    def act(self, *_: Any) -> None:
        pass

    forfeit = act


class Cheating(Auction):
    def rewards(self) -> dict[int, float]:
        return {0: 1.0}


class Alone(Environment):
    def reset(self, row: Mapping[str, Any]) -> None:
        pass


ALONE = {"players": ["policy", f"scripted:{__file__}:seven"]}


def seven(turn: PlayerTurn) -> str:
    """Play 7, whatever happened."""
    return "7"


def numbers(turn: PlayerTurn) -> Any:
    """Return no text, which is a mistake."""
    return 7


@pytest.fixture(autouse=True)
def no_games() -> None:
    Auction.made = []


def seat_of(request: ScriptedRequest) -> int:
    text = hermes_template().decode(request.prompt_ids.tolist())
    [seat] = [seat for seat in range(3) if f"You are seat {seat}." in text]
    return seat


def by_seat(*moves: Sequence[str]) -> Callable[[ScriptedRequest], ScriptedReply]:
    """Return a script that answers as the seat of the request's conversation."""
    return lambda request: text_reply(moves[seat_of(request)][request.turn])


TWO = by_seat(["1", "2"], ["3", "4"])


def play(
    script: Any, make: Callable[[], Any] = Auction, row: Mapping[str, Any] | None = None, **limits: Any
) -> list[Trajectory]:
    environments = {"auction": EnvironmentFactory.of(make, where="auction")}
    harness = WorkerHarness(script, environments=environments, agent="game_agent", **limits)
    Auction.made.clear()
    raw_prompt = [{"role": "system", "content": "Play."}, *user("An auction.")]
    return harness.run([{"raw_prompt": raw_prompt, **(row or {})}])


def rewards(trajectories: Sequence[Trajectory]) -> list[float | None]:
    return [trajectory.reward for trajectory in trajectories]


def reasons(trajectories: Sequence[Trajectory]) -> list[StopReason]:
    return [trajectory.output.stop_reason for trajectory in trajectories]


def test_in_self_play_every_seat_is_a_trajectory_with_its_own_reward_and_its_own_view() -> None:
    first, second = trajectories = play(TWO)
    assert rewards(trajectories) == [-1.0, 1.0]
    assert [t.output.extra_fields["seat"] for t in trajectories] == [0, 1]
    assert [t.branch for t in trajectories] == [0, 1]
    contents = [message["content"] for message in first.output.messages]
    heard = ["You are seat 0. Name a number.", "1", " Seat 1 says 3.", "2", " Seat 1 says 4."]
    assert contents == ["Play.", *heard]
    assert roles(second.output.messages) == ["system", "user", "assistant", "user", "assistant"]
    assert second.output.messages[1]["content"] == "You are seat 1. Name a number. Seat 0 says 1."
    assert set(reasons(trajectories)) == {StopReason.INTERACTION_FINISHED}
    assert Auction.made[0].is_closed
    for trajectory, moves in zip(trajectories, ("12", "34"), strict=True):
        output = trajectory.output
        trained = output.response_ids[output.response_mask.astype(bool)].tolist()
        assert hermes_template().decode(trained).replace("<|im_end|>", "") == moves


def test_opponents_are_observed_and_have_no_trajectory() -> None:
    [trajectory] = play(TWO, row=ALONE)
    assert trajectory.branch is None
    assert trajectory.reward == -1.0
    assert " Seat 1 says 7." in [message["content"] for message in trajectory.output.messages]


def test_random_players_play_legal_moves_and_first_players_the_first() -> None:
    row = {"num_seats": 3, "players": ["first", "policy", "random"]}
    [trajectory] = play(by_seat([], ["9", "9"]), row=row)
    assert trajectory.reward == 1.0
    assert Auction.made[0].sums[0] == 2
    assert 2 <= Auction.made[0].sums[2] <= 6
    assert trajectory.output.extra_fields["seat"] == 1


def test_a_seat_without_a_turn_has_its_reward_and_no_tokens() -> None:
    _, second = play(by_seat(["what?"], ["3"]))
    assert len(second.output.response_ids) == 0
    assert second.output.stop_reason is StopReason.INTERACTION_FINISHED


def test_a_seat_at_a_limit_forfeits_and_the_others_end_properly() -> None:
    trajectories = play(TWO, max_assistant_turns=1)
    assert rewards(trajectories) == [-1.0, 1.0]
    assert reasons(trajectories) == [StopReason.MAX_ASSISTANT_TURNS, StopReason.INTERACTION_FINISHED]


def test_a_move_that_is_cut_forfeits() -> None:
    trajectories = play([text_reply("9" * 40, ends=False)], response_length=8)
    assert rewards(trajectories) == [-1.0, 1.0]
    assert reasons(trajectories)[0] is StopReason.RESPONSE_LENGTH


@pytest.mark.parametrize("left", [4, 3, 1])
def test_a_game_that_cannot_be_reached_fails_all_seats_without_rewards(left: int) -> None:
    trajectories = play(TWO, row={"fails": left})
    assert rewards(trajectories) == [None] * len(trajectories)
    assert len(trajectories) == (1 if left > 2 else 2)
    assert all("the table is gone" in error_of(trajectory) for trajectory in trajectories)
    assert Auction.made[0].is_closed


def test_a_server_that_fails_one_seat_fails_all_of_the_game() -> None:
    trajectories = play(
        lambda request: ScriptedReply([], error="no memory") if seat_of(request) else text_reply("1")
    )
    assert rewards(trajectories) == [None, None]
    assert set(reasons(trajectories)) == {StopReason.FAILED}


@pytest.mark.parametrize(
    ("make", "row", "message"),
    [
        (Endless, {"players": ["policy", "first"]}, "did not end"),
        (Cheating, {}, "a finite number for each seat"),
        (Alone, {}, "set agent_name to environment_agent"),
        (Auction, {"players": ["policy"]}, "has 1 players, and the game has 2 seats"),
        (Auction, {"players": ["policy", f"scripted:{__file__}:numbers"]}, "return a str"),
    ],
)
def test_mistakes_of_games_and_players_are_named(make: Any, row: Mapping[str, Any], message: str) -> None:
    trajectories = play(by_seat(["1"] * 3, ["3", "4"]), make, row, max_assistant_turns=3)
    assert rewards(trajectories) == [None] * len(trajectories)
    assert all(message in error_of(trajectory) for trajectory in trajectories)


@pytest.mark.parametrize(
    ("players", "message"),
    [
        ("randm", "there is no player 'randm'"),
        (["random", "first"], "the policy has no seat"),
        (3, "give a player, or a list"),
    ],
)
def test_a_row_with_wrong_players_is_refused_before_the_run(players: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        GameAgentLoop.check_row({"players": players}, {}, where="row 0")


async def play_against(*replies: str, **settings: Any) -> tuple[Trajectory, Endpoint]:
    """Play the first seat against a model on another server, which returns these replies."""
    async with endpoint(*replies) as served:
        opponent = {"model": "old", "base_url": served.url, "max_retries": 0, **settings}

        @register("against_old")
        class AgainstOld(GameAgentLoop):
            def __init__(self, context: LoopContext) -> None:
                super().__init__(context, players=["policy", "old"], opponents={"old": opponent})

        environments = {"auction": EnvironmentFactory.of(Auction, where="auction")}
        harness = WorkerHarness(TWO, environments=environments, agent="against_old")
        [trajectory] = await harness.worker.run(harness.jobs([{"raw_prompt": user("An auction.")}]))
        harness.assert_nothing_is_left()
        return trajectory, served


async def test_an_opponent_on_another_server_sees_the_conversation_of_its_seat() -> None:
    trajectory, served = await play_against("3", "4", temperature=0, system_prompt="Win.")
    assert (trajectory.reward, trajectory.branch) == (-1.0, None)
    assert trajectory.output.extra_fields["seat"] == 0
    texts = [message["content"] for message in trajectory.output.messages]
    assert texts[2::2] == [" Seat 1 says 3.", " Seat 1 says 4."]
    system = {"role": "system", "content": "Win."}
    heard = alternating("You are seat 1. Name a number. Seat 0 says 1.", "3", " Seat 0 says 2.")
    assert [request["messages"] for request in served.requests] == [[system, *heard[:1]], [system, *heard]]
    assert [request["temperature"] for request in served.requests] == [0, 0]


async def test_a_game_whose_opponent_is_gone_fails_by_name_and_without_a_reward() -> None:
    trajectory, _ = await play_against(base_url="http://127.0.0.1:9/v1")
    assert trajectory.reward is None
    assert "the opponent 'old' (model 'old') returned no move" in error_of(trajectory)
    assert trajectory.output.failure is not None
    assert trajectory.output.failure.kind is FailureKind.ENVIRONMENT
