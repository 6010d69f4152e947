"""The server's end of what goes between it and one client: posts in their order, answers as soon as there are some."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from agent_loop.distributed.pace import Pace
from agent_loop.distributed.wire import Post, Response

Held: TypeAlias = asyncio.Future[list[tuple[int, Response]]]
"""A post that waits for answers."""


class Line:
    """What one client posts, and the answers on their way to it.

    Each post is held until there are answers, and takes all there are, whichever post had the asks. Where completions
    are many, one exchange so carries many; where they are few, each takes one.
    """

    def __init__(self, client: str, *, take: Callable[[Line, Post], None]) -> None:
        """Args: take: Given the posts in the order in which the client sent them, whatever order they came in."""
        self.client = client
        self._take = take
        self._early: dict[int, tuple[Post, Held]] = {}
        self._num_taken = 0
        self._open: dict[int, float] = {}
        """When each call was asked for."""
        self._held: deque[Held] = deque()
        self._answers: list[tuple[int, Response]] = []
        self._pace = Pace(self._hand_over)

    @property
    def num_held(self) -> int:
        """Posts that wait for answers."""
        return len(self._held) + len(self._early)

    async def exchange(self, post: Post) -> list[tuple[int, Response]]:
        """Takes a post, and gives the answers that there are then, by call; none if nothing is left to wait for."""
        held: Held = asyncio.get_running_loop().create_future()
        self._early[post.number] = post, held
        while (due := self._early.pop(self._num_taken, None)) is not None:
            self._num_taken += 1
            self._accept(*due)
        return await held

    def answer(self, call: int, response: Response) -> None:
        """Sends it when the client can be told, if the line is not closed. Every ask is answered or given up, once."""
        asked_at = self._open.pop(call, None)
        if asked_at is None:
            return
        self._pace.note(asyncio.get_running_loop().time() - asked_at)
        self._answers.append((call, response))
        self._pace.ask()

    def give_up(self, call: int) -> None:
        """An ask will not be answered: the client does not want it any more."""
        self._open.pop(call, None)
        self._pace.ask()

    def close(self) -> None:
        """Lets go of the posts that wait: nobody is at the other end any more."""
        self._held += [held for _, held in self._early.values()]
        self._early.clear()
        self._open.clear()
        self._hand_over()

    def _accept(self, post: Post, held: Held) -> None:
        now = asyncio.get_running_loop().time()
        self._open |= {ask.call: now for ask in post.asks}
        self._take(self, post)
        if post.is_urgent:
            self._held.appendleft(held)
            self._let_go()
        else:
            self._held.append(held)
        if self._answers or len(self._held) > len(self._open):
            self._pace.ask()

    def _hand_over(self) -> None:
        """Gives the answers to the post that waits longest, and lets go of posts that there can be no answers for."""
        if self._answers and self._held:
            self._let_go()
        while len(self._held) > len(self._open):
            self._let_go()

    def _let_go(self) -> None:
        held, answers = self._held.popleft(), self._answers
        self._answers = []
        if not held.done():
            held.set_result(answers)
