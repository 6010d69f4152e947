"""The loop of games: one trajectory for each seat that the policy plays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agent_loop.config import parse_section
from agent_loop.environments.factory import find_environment
from agent_loop.environments.live import LiveGame, run_close
from agent_loop.environments.players import (
    POLICY,
    ModelPlayer,
    OpponentSettings,
    Player,
    ScriptedPlayer,
    read_players,
)
from agent_loop.episode import Episode, EpisodeStopped
from agent_loop.errors import DataError, EnvironmentBug
from agent_loop.loops.base import AgentLoopBase, LoopContext
from agent_loop.loops.registry import register
from agent_loop.runtime.concurrency import run_together
from agent_loop.seeds import trajectory_seed
from agent_loop.trajectory import AgentLoopOutput, Failure, Incident
from agent_loop.trajectory.branches import SEAT
from agent_loop.types import Message, StopReason

MAX_FORFEITED_TURNS = 1000
"""Turns in a row that end with a forfeit or are scripted, before a game counts as endless."""


@register("game_agent")
class GameAgentLoop(AgentLoopBase):
    """A game of one or several players. Each seat of the policy is a trajectory of its own, with its own reward.

    The row's `environment` names a game: a suite of games, or one of `rollout.multi_turn.environments`. The row's
    `players` is a player for all seats, or a list with one for each seat: `policy`, `random` or `first` (legal moves),
    `scripted:file.py:function` or `scripted:module:function`, or one of `opponents`.

    A seat's conversation has the system messages of `raw_prompt`, and then the game's observations as user messages.
    The moves of other seats are part of the observations, and are not trained. A seat whose trajectory hits a limit
    forfeits. Every trajectory has its seat in `extra_fields["seat"]`.

    Args:
        context: Context of the loop.
        players: The players of rows without a column `players`.
        opponents: Models on other servers, by the names that `players` uses for them; see `OpponentSettings`.
    """

    def __init__(
        self,
        context: LoopContext,
        *,
        players: str | Sequence[str] = POLICY,
        opponents: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(context)
        self._given = players
        self._opponents = read_opponents(opponents)
        self._seats: list[PolicySeat] = []

    @classmethod
    def check_row(cls, row: Mapping[str, Any], arguments: Mapping[str, Any], *, where: str) -> None:
        given = row.get("players") or arguments.get("players", POLICY)
        opponents = read_opponents(arguments.get("opponents"))
        read_players(given, num_seats=None, opponents=opponents, where=f"{where}: players")

    async def run(
        self, sampling_params: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        factory = find_environment(row.get("environment"), known=self.context.environments)
        game = LiveGame(factory, limits=self.context.multi_turn)
        players: dict[int, Player] = {}
        incidents: list[Incident] = []
        try:
            num_seats = await game.reset(row)
            given = row.get("players") or self._given
            names = read_players(given, num_seats=num_seats, opponents=self._opponents, where="players")
            for seat, name in enumerate(names):
                players[seat] = self._player(seat, name, game, row=row, sampling_params=sampling_params)
            rewards = await self._play(game, players)
        finally:
            incidents += await self._close(game, players)
        outputs = self._outputs(rewards=rewards)
        for incident in incidents:
            outputs[0] = outputs[0].noted(incident)
        return outputs if len(outputs) > 1 else outputs[0]

    def unfinished_output(
        self, reason: StopReason, *, failure: Failure | None = None
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Return the records of all seats. None has a reward, because the game has no result."""
        for seat in self._seats:
            if seat.episode is not None:
                seat.episode.stop(reason)
        outputs = self._outputs(failure=failure)
        if not outputs:
            return AgentLoopOutput(segments=(), stop_reason=reason, failure=failure)
        return outputs if len(outputs) > 1 else outputs[0]

    def _outputs(
        self, *, rewards: Mapping[int, float] | None = None, failure: Failure | None = None
    ) -> list[AgentLoopOutput]:
        return [
            seat.episode.output(
                reward_score=None if rewards is None else rewards[seat.seat],
                extra_fields={SEAT: seat.seat},
                failure=failure,
            )
            for seat in self._seats
            if seat.episode is not None
        ]

    async def _play(self, game: LiveGame, players: Mapping[int, Player]) -> dict[int, float]:
        """Play the game, with the episode of each seat of the policy in a task of its own."""
        rewards: dict[int, float] = {}

        async def deal() -> None:
            rewards.update(await self._deal(game, players))

        await run_together([deal(), *(seat.run() for seat in self._seats)])
        return rewards

    async def _deal(self, game: LiveGame, players: Mapping[int, Player]) -> dict[int, float]:
        """Give each seat its turns until the game is over, and return the rewards."""
        num_idle = 0
        while (seat := await game.turn()) is not None:
            move = await players[seat].move(await game.observe(seat))
            if move is None:
                await game.forfeit(seat)
            else:
                await game.act(seat, move)
            is_played = move is not None and isinstance(players[seat], PolicySeat)
            num_idle = 0 if is_played else num_idle + 1
            if num_idle > MAX_FORFEITED_TURNS:
                raise EnvironmentBug(
                    f"{game.where} did not end in {MAX_FORFEITED_TURNS} turns without a move of the policy; end it in "
                    "its method forfeit"
                )
        rewards = await game.rewards()
        for policy_seat in self._seats:
            policy_seat.end(await game.observe(policy_seat.seat))
        return rewards

    def _player(
        self,
        seat: int,
        name: str,
        game: LiveGame,
        *,
        row: Mapping[str, Any],
        sampling_params: Mapping[str, Any],
    ) -> Player:
        if name in self._opponents:
            return ModelPlayer(name, self._opponents[name])
        if name != POLICY:
            rng = random.Random(trajectory_seed("player", seat))
            moves = partial(game.legal_moves, seat)
            return ScriptedPlayer(name, seat=seat, legal_moves=moves, rng=rng)
        prompt: Sequence[Message] = row["raw_prompt"]
        head = [message for message in prompt if message["role"] == "system"]
        player = PolicySeat(seat, open_episode=self.episode, head=head, sampling_params=sampling_params)
        self._seats.append(player)
        return player

    async def _close(self, game: LiveGame, players: Mapping[int, Player]) -> list[Incident]:
        """Close the game and its players, shielded from cancellation, and return what went wrong."""
        timeout_s = self.context.multi_turn.close_timeout_s
        incidents = await game.close()
        for seat, player in players.items():
            what = f"the player of seat {seat}"
            incidents += await run_close(player.close, what=what, timeout_s=timeout_s)
        return incidents


def read_opponents(given: Mapping[str, Mapping[str, Any]] | None) -> dict[str, OpponentSettings]:
    """Return the opponents of a loop's entry."""
    opponents: dict[str, OpponentSettings] = {}
    for name, settings in (given or {}).items():
        if name in {POLICY, "random", "first"}:
            raise DataError(f"opponents: {name!r} is the name of another player; choose another")
        opponents[name] = parse_section(OpponentSettings, settings, where=f"opponents.{name}")
    return opponents


@dataclass(frozen=True, slots=True)
class _Turn:
    observation: str
    is_over: bool = False
    """Whether the game is over, so that no move follows."""


class PolicySeat(Player):
    """Player of a seat: the policy. The game's observations are the user messages of its episode."""

    def __init__(
        self,
        seat: int,
        *,
        open_episode: Callable[[Sequence[Message]], Episode],
        head: Sequence[Message],
        sampling_params: Mapping[str, Any],
    ) -> None:
        self.seat = seat
        self.episode: Episode | None = None
        """None before the first observation."""
        self._open_episode = open_episode
        self._head = list(head)
        self._sampling_params = dict(sampling_params)
        self._turns: asyncio.Queue[_Turn] = asyncio.Queue()
        self._moves: asyncio.Queue[str | None] = asyncio.Queue()
        self._can_move = True

    async def move(self, observation: str) -> str | None:
        """Sample and return a move. Return None if the episode has ended."""
        move = None
        if self._can_move:
            self._turns.put_nowait(_Turn(observation))
            move = await self._moves.get()
        if self.episode is not None and self.episode.stop_reason is StopReason.CANCELLED:
            raise EpisodeStopped(StopReason.CANCELLED)
        return move

    def end(self, observation: str) -> None:
        """Tell the seat how the game ended. The text is recorded, but the model does not see it."""
        self._turns.put_nowait(_Turn(observation, is_over=True))

    async def run(self) -> None:
        """Run the episode, until the game is over or the episode can go on no more."""
        try:
            first = await self._turns.get()
            self.episode = self._open_episode([*self._head, {"role": "user", "content": first.observation}])
            async with self.episode as episode:
                if first.is_over:
                    episode.stop(StopReason.INTERACTION_FINISHED)
                else:
                    await self._play(episode)
                await episode.finish()
        except EpisodeStopped:
            pass
        finally:
            self._can_move = False
            self._moves.put_nowait(None)

    async def _play(self, episode: Episode) -> None:
        while True:
            completion = await episode.generate(self._sampling_params)
            if completion.is_cut:
                episode.stop(StopReason.RESPONSE_LENGTH)
                return
            # A move counts even if the limits allow no further turn: they end the episode at the next observation.
            self._moves.put_nowait(completion.content)
            turn = await self._turns.get()
            message: Message = {"role": "user", "content": turn.observation}
            if turn.is_over:
                if turn.observation:
                    episode.record_message(message)
                episode.stop(StopReason.INTERACTION_FINISHED)
                return
            if not await episode.observe([message]) or episode.stop_reason is not None:
                return
