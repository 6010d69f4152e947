"""A seat of a game that the policy plays: one episode, which runs in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.episode import Episode, EpisodeStopped
from agent_loop.types import Message, StopReason


@dataclass(frozen=True, slots=True)
class _Turn:
    observation: str
    is_over: bool = False
    """Whether the game is over, so that no move follows."""


class PolicySeat:
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

    async def close(self) -> None:
        pass

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
