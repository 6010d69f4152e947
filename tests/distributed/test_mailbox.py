"""What a client asks and what a server answers meet in few messages, in order, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from agent_loop.distributed.contexts import Delta
from agent_loop.distributed.line import Line
from agent_loop.distributed.mailbox import END_WITHIN_S, Mailbox
from agent_loop.distributed.pace import AT_MOST_EVERY_S, EVERY_S, SHARE, Pace
from agent_loop.distributed.wire import Ask, LineLost, PackedCompletion, Post, Reply
from agent_loop.runtime.concurrency import run_together
from agent_loop.testing import run_virtual
from agent_loop.types import SamplingParams, TokenOutput

WAY_S = 0.0005
"""What a message takes."""


class Actor:
    """A server that answers each call after some seconds, and what went to it."""

    def __init__(self, seconds: Callable[[int], float] = lambda call: 0.0) -> None:
        self.posts: list[Post] = []
        self.lines: dict[str, Line] = {}
        self.delays = iter([0.0] * 10_000)
        self.is_dead = False
        self._seconds = seconds
        self._running: dict[int, asyncio.TimerHandle] = {}

    async def open_line(self) -> str:
        await self._travel()
        for line in self.lines.values():
            line.close()
        self.lines = {f"line {len(self.posts)}": Line("client", take=self._take)}
        return next(iter(self.lines))

    async def exchange(self, packed: bytes) -> bytes:
        post: Post = pickle.loads(packed)
        await self._travel(next(self.delays))
        line = self.lines.get(post.line)
        if line is None:
            raise LineLost("it was started again")
        responses = await line.exchange(post)
        await self._travel()
        return pickle.dumps(Reply(responses, 0))

    def start_again(self) -> None:
        self.lines = {}
        for handle in self._running.values():
            handle.cancel()

    async def _travel(self, longer_s: float = 0.0) -> None:
        await asyncio.sleep(WAY_S + longer_s)
        if self.is_dead:
            raise LineLost("killed")

    def _take(self, line: Line, post: Post) -> None:
        self.posts.append(post)
        loop = asyncio.get_running_loop()
        for call in post.cancelled:
            if (handle := self._running.pop(call, None)) is not None:
                handle.cancel()
                line.give_up(call)
        for ask in post.asks:
            self._running[ask.call] = loop.call_later(self._seconds(ask.call), self._answer, line, ask.call)

    def _answer(self, line: Line, call: int) -> None:
        del self._running[call]
        line.answer(call, answer(call))


def answer(call: int) -> PackedCompletion:
    return PackedCompletion.pack(TokenOutput([call], None, "stop"))


def ask(call: int, session: str = "s") -> Ask:
    return Ask.pack(call, session, Delta(0, 0, b""), SamplingParams(top_k=5))


def mailbox_to(actor: Actor) -> Mailbox:
    return Mailbox(open_line=actor.open_line, exchange=actor.exchange, on_reply=lambda _: None)


def run_with(actor: Actor, scenario: Callable[[Mailbox], Coroutine[Any, Any, None]]) -> None:
    """Runs a scenario; nothing of the mailbox runs on behind it."""

    async def main() -> None:
        await scenario(mailbox_to(actor))
        await asyncio.sleep(1)
        assert len(asyncio.all_tasks()) == 1
        assert all(line.num_held == 0 for line in actor.lines.values())

    run_virtual(main())


def test_asks_of_one_moment_share_a_message_and_so_do_their_answers() -> None:
    actor = Actor()

    async def scenario(mailbox: Mailbox) -> None:
        found = await run_together(mailbox.ask(ask(call)) for call in range(64))
        assert found == [answer(call) for call in range(64)]
        assert len(actor.posts) == 1

    run_with(actor, scenario)


def test_completions_far_apart_take_one_message_each() -> None:
    actor = Actor(lambda call: 10 + 1.7 * call % 5)

    async def one(mailbox: Mailbox, call: int) -> None:
        await asyncio.sleep(0.3 * call)
        assert await mailbox.ask(ask(call)) == answer(call)

    async def scenario(mailbox: Mailbox) -> None:
        await run_together(one(mailbox, call) for call in range(50))
        assert sum(len(post.asks) for post in actor.posts) == len(actor.posts) == 50

    run_with(actor, scenario)


def test_the_longer_answers_take_the_more_share_a_message() -> None:
    actor = Actor(lambda call: 4.0)
    slowest = 0.0

    async def one(mailbox: Mailbox, call: int) -> None:
        nonlocal slowest
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(0.01 * call)
        asked_at = clock()
        assert await mailbox.ask(ask(call)) == answer(call)
        slowest = max(slowest, clock() - asked_at)

    async def scenario(mailbox: Mailbox) -> None:
        await run_together(one(mailbox, call) for call in range(2000))
        assert sum(len(post.asks) for post in actor.posts) == 2000
        assert len(actor.posts) < 1000
        assert slowest < 4 * (1 + 3 * SHARE)

    run_with(actor, scenario)


def test_nothing_waits_longer_than_a_moment_for_something_to_go_with() -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        called_at: list[float] = []
        pace = Pace(lambda: called_at.append(clock()))
        for _ in range(100):
            pace.note(3600.0)
        for _ in range(100):
            pace.ask()
            await asyncio.sleep(0.01)
        waits = [later - earlier for earlier, later in pairwise([0.0, *called_at])]
        assert max(waits) == pytest.approx(AT_MOST_EVERY_S)

    run_virtual(main())


def test_who_is_alone_does_not_wait_for_others() -> None:
    async def scenario(mailbox: Mailbox) -> None:
        await mailbox.ask(ask(0))
        await asyncio.sleep(1)
        clock = asyncio.get_running_loop().time
        began = clock()
        await mailbox.ask(ask(1))
        assert clock() - began == pytest.approx(2 * WAY_S)

    run_with(Actor(), scenario)


def test_a_short_completion_does_not_wait_for_a_long_one_of_the_same_message() -> None:
    async def scenario(mailbox: Mailbox) -> None:
        clock = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as group:
            long = group.create_task(mailbox.ask(ask(100)))
            for call in range(5):
                await mailbox.ask(ask(call))
            assert clock() < 5.1
            assert not long.done()

    run_with(Actor(lambda call: 100.0 if call == 100 else 1.0), scenario)


def test_a_cancelled_ask_is_cancelled_at_the_server_and_one_that_was_not_posted_never_gets_there() -> None:
    actor = Actor(lambda call: 3600.0)

    async def scenario(mailbox: Mailbox) -> None:
        posted = asyncio.ensure_future(mailbox.ask(ask(1)))
        while not actor.posts:  # noqa: ASYNC110  (in virtual time)
            await asyncio.sleep(EVERY_S / 10)
        early = asyncio.ensure_future(mailbox.ask(ask(2)))
        await asyncio.sleep(EVERY_S / 10)
        posted.cancel()
        early.cancel()
        await asyncio.wait({posted, early})

    run_with(actor, scenario)
    assert [[a.call for a in post.asks] for post in actor.posts] == [[1], []]
    assert [list(post.cancelled) for post in actor.posts] == [[], [1]]


def test_posts_that_overtake_each_other_are_taken_in_their_order() -> None:
    actor = Actor(lambda call: 3600.0)
    actor.delays = iter([0.0, 5.0, 0.0, 0.0])

    async def scenario(mailbox: Mailbox) -> None:
        first = asyncio.ensure_future(mailbox.ask(ask(1)))
        await asyncio.sleep(1)
        second = asyncio.ensure_future(mailbox.ask(ask(2)))
        await asyncio.sleep(1)
        second.cancel()
        await asyncio.sleep(1)
        assert len(actor.posts) == 1
        first.cancel()
        await asyncio.sleep(10)

    run_with(actor, scenario)
    assert [post.number for post in actor.posts] == [0, 1, 2, 3]


def test_sessions_that_ended_ride_along_or_go_alone_after_a_moment() -> None:
    actor = Actor()

    async def scenario(mailbox: Mailbox) -> None:
        mailbox.end("the server never had it")
        await mailbox.ask(ask(0))
        mailbox.end("a")
        mailbox.end("b")
        await mailbox.ask(ask(1))
        mailbox.end("c")
        await asyncio.sleep(2 * END_WITHIN_S)
        mailbox.end("d")
        await mailbox.settled()
        assert actor.posts[-1].ended == ["d"]

    run_with(actor, scenario)
    assert [post.ended for post in actor.posts] == [[], ["a", "b"], ["c"], ["d"]]


def test_settling_waits_for_what_was_told_and_not_for_completions() -> None:
    actor = Actor(lambda call: 3600.0)

    async def scenario(mailbox: Mailbox) -> None:
        hanging = asyncio.ensure_future(mailbox.ask(ask(0)))
        await asyncio.sleep(1)
        mailbox.end("a")
        await mailbox.settled()
        assert [post.ended for post in actor.posts] == [[], ["a"]]
        assert asyncio.get_running_loop().time() < 1.1
        hanging.cancel()

    run_with(actor, scenario)


@pytest.mark.parametrize("break_it", [lambda actor: setattr(actor, "is_dead", True), Actor.start_again])
def test_every_ask_hears_that_the_server_is_lost_and_later_ones_begin_anew(
    break_it: Callable[[Actor], None],
) -> None:
    actor = Actor(lambda call: 10.0)

    async def lost(mailbox: Mailbox, call: int) -> None:
        with pytest.raises(LineLost):
            await mailbox.ask(ask(call))

    async def breaks(mailbox: Mailbox) -> None:
        await asyncio.sleep(1)
        lines = list(actor.lines.values())
        break_it(actor)
        for line in lines:
            line.close()
        await lost(mailbox, 20)

    async def scenario(mailbox: Mailbox) -> None:
        await run_together([*(lost(mailbox, call) for call in range(20)), breaks(mailbox)])
        mailbox.end("it is gone with the server")
        await mailbox.settled()
        actor.is_dead = False
        assert await mailbox.ask(ask(21)) == answer(21)
        assert actor.posts[-1].number == 0

    run_with(actor, scenario)


def test_what_is_wrong_with_an_exchange_reaches_whoever_waits() -> None:
    async def fails(_: bytes) -> bytes:
        raise ValueError("not what was agreed")

    async def main() -> None:
        mailbox = Mailbox(open_line=Actor().open_line, exchange=fails, on_reply=lambda _: None)
        with pytest.raises(LineLost, match="ValueError: not what was agreed"):
            await mailbox.ask(ask(1))

    run_virtual(main())
