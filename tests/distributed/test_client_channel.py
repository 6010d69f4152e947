"""Requests and responses share messages, keep their order, and never wait forever."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from agent_loop.distributed.client_channel import END_WITHIN_S, ClientChannel
from agent_loop.distributed.contexts import ContextDelta
from agent_loop.distributed.messages import (
    ChannelLost,
    GenerationRequest,
    PackedCompletion,
    RequestBatch,
    ResponseBatch,
)
from agent_loop.distributed.server_channel import ServerChannel
from agent_loop.distributed.throttle import LATENCY_SHARE, MAX_INTERVAL_S, MIN_INTERVAL_S, Throttle
from agent_loop.runtime.concurrency import run_together
from agent_loop.testing import run_virtual
from agent_loop.types import SamplingParams, TokenOutput

TRAVEL_S = 0.0005
"""Seconds that a message takes."""


class Actor:
    """Server that responds to each request after some seconds, and records the batches."""

    def __init__(self, seconds: Callable[[int], float] = lambda call: 0.0) -> None:
        self.batches: list[RequestBatch] = []
        self.channels: dict[str, ServerChannel] = {}
        self.delays = iter([0.0] * 10_000)
        self.is_dead = False
        self._seconds = seconds
        self._running: dict[int, asyncio.TimerHandle] = {}

    async def open_channel(self) -> str:
        await self._travel()
        for channel in self.channels.values():
            channel.close()
        self.channels = {f"channel {len(self.batches)}": ServerChannel("client", on_batch=self._process)}
        return next(iter(self.channels))

    async def exchange(self, packed: bytes) -> bytes:
        batch: RequestBatch = pickle.loads(packed)
        await self._travel(next(self.delays))
        channel = self.channels.get(batch.channel)
        if channel is None:
            raise ChannelLost("it was restarted")
        responses = await channel.exchange(batch)
        await self._travel()
        return pickle.dumps(ResponseBatch(responses, 0))

    def restart(self) -> None:
        self.channels = {}
        for handle in self._running.values():
            handle.cancel()

    async def _travel(self, longer_s: float = 0.0) -> None:
        await asyncio.sleep(TRAVEL_S + longer_s)
        if self.is_dead:
            raise ChannelLost("killed")

    def _process(self, channel: ServerChannel, batch: RequestBatch) -> None:
        self.batches.append(batch)
        loop = asyncio.get_running_loop()
        for call in batch.cancelled:
            if (handle := self._running.pop(call, None)) is not None:
                handle.cancel()
                channel.give_up(call)
        for request in batch.requests:
            self._running[request.call_id] = loop.call_later(
                self._seconds(request.call_id), self._respond, channel, request.call_id
            )

    def _respond(self, channel: ServerChannel, call: int) -> None:
        del self._running[call]
        channel.respond(call, response(call))


def response(call: int) -> PackedCompletion:
    return PackedCompletion.pack(TokenOutput([call], None, "stop"))


def request(call: int, session: str = "s") -> GenerationRequest:
    return GenerationRequest.pack(call, session, ContextDelta(0, 0, b""), SamplingParams(top_k=5))


def channel_to(actor: Actor) -> ClientChannel:
    return ClientChannel(
        open_channel=actor.open_channel, exchange=actor.exchange, on_responses=lambda _: None
    )


def run_with(actor: Actor, scenario: Callable[[ClientChannel], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario. Check that no task and no exchange is left."""

    async def main() -> None:
        await scenario(channel_to(actor))
        await asyncio.sleep(1)
        assert len(asyncio.all_tasks()) == 1
        assert all(channel.num_pending == 0 for channel in actor.channels.values())

    run_virtual(main())


def test_concurrent_requests_share_a_message_and_so_do_their_responses() -> None:
    actor = Actor()

    async def scenario(channel: ClientChannel) -> None:
        found = await run_together(channel.send(request(call)) for call in range(64))
        assert found == [response(call) for call in range(64)]
        assert len(actor.batches) == 1

    run_with(actor, scenario)


def test_completions_far_apart_take_one_message_each() -> None:
    actor = Actor(lambda call: 10 + 1.7 * call % 5)

    async def one(channel: ClientChannel, call: int) -> None:
        await asyncio.sleep(0.3 * call)
        assert await channel.send(request(call)) == response(call)

    async def scenario(channel: ClientChannel) -> None:
        await run_together(one(channel, call) for call in range(50))
        assert sum(len(batch.requests) for batch in actor.batches) == len(actor.batches) == 50

    run_with(actor, scenario)


def test_more_requests_share_a_message_if_responses_take_longer() -> None:
    actor = Actor(lambda call: 4.0)
    slowest = 0.0

    async def one(channel: ClientChannel, call: int) -> None:
        nonlocal slowest
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(0.01 * call)
        began_at = clock()
        assert await channel.send(request(call)) == response(call)
        slowest = max(slowest, clock() - began_at)

    async def scenario(channel: ClientChannel) -> None:
        await run_together(one(channel, call) for call in range(2000))
        assert sum(len(batch.requests) for batch in actor.batches) == 2000
        assert len(actor.batches) < 1000
        assert slowest < 4 * (1 + 3 * LATENCY_SHARE)

    run_with(actor, scenario)


def test_no_message_waits_longer_than_the_maximum_interval() -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        called_at: list[float] = []
        throttle = Throttle(lambda: called_at.append(clock()))
        for _ in range(100):
            throttle.record_latency(3600.0)
        for _ in range(100):
            throttle.request()
            await asyncio.sleep(0.01)
        waits = [later - earlier for earlier, later in pairwise([0.0, *called_at])]
        assert max(waits) == pytest.approx(MAX_INTERVAL_S)

    run_virtual(main())


def test_a_single_request_is_sent_at_once() -> None:
    async def scenario(channel: ClientChannel) -> None:
        await channel.send(request(0))
        await asyncio.sleep(1)
        clock = asyncio.get_running_loop().time
        began = clock()
        await channel.send(request(1))
        assert clock() - began == pytest.approx(2 * TRAVEL_S)

    run_with(Actor(), scenario)


def test_a_short_completion_does_not_wait_for_a_long_one_of_the_same_message() -> None:
    async def scenario(channel: ClientChannel) -> None:
        clock = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as group:
            long = group.create_task(channel.send(request(100)))
            for call in range(5):
                await channel.send(request(call))
            assert clock() < 5.1
            assert not long.done()

    run_with(Actor(lambda call: 100.0 if call == 100 else 1.0), scenario)


def test_a_cancelled_request_is_cancelled_at_the_server_if_it_was_sent_and_is_not_sent_otherwise() -> None:
    actor = Actor(lambda call: 3600.0)

    async def scenario(channel: ClientChannel) -> None:
        posted = asyncio.ensure_future(channel.send(request(1)))
        while not actor.batches:  # noqa: ASYNC110  (in virtual time)
            await asyncio.sleep(MIN_INTERVAL_S / 10)
        early = asyncio.ensure_future(channel.send(request(2)))
        await asyncio.sleep(MIN_INTERVAL_S / 10)
        posted.cancel()
        early.cancel()
        await asyncio.wait({posted, early})

    run_with(actor, scenario)
    assert [[r.call_id for r in batch.requests] for batch in actor.batches] == [[1], []]
    assert [list(batch.cancelled) for batch in actor.batches] == [[], [1]]


def test_batches_that_overtake_each_other_are_processed_in_their_order() -> None:
    actor = Actor(lambda call: 3600.0)
    actor.delays = iter([0.0, 5.0, 0.0, 0.0])

    async def scenario(channel: ClientChannel) -> None:
        first = asyncio.ensure_future(channel.send(request(1)))
        await asyncio.sleep(1)
        second = asyncio.ensure_future(channel.send(request(2)))
        await asyncio.sleep(1)
        second.cancel()
        await asyncio.sleep(1)
        assert len(actor.batches) == 1
        first.cancel()
        await asyncio.sleep(10)

    run_with(actor, scenario)
    assert [batch.number for batch in actor.batches] == [0, 1, 2, 3]


def test_ends_of_sessions_travel_with_requests_or_alone_after_a_short_wait() -> None:
    actor = Actor()

    async def scenario(channel: ClientChannel) -> None:
        channel.end_session("the server never had it")
        await channel.send(request(0))
        channel.end_session("a")
        channel.end_session("b")
        await channel.send(request(1))
        channel.end_session("c")
        await asyncio.sleep(2 * END_WITHIN_S)
        channel.end_session("d")
        await channel.flush()
        assert actor.batches[-1].ended == ["d"]

    run_with(actor, scenario)
    assert [batch.ended for batch in actor.batches] == [[], ["a", "b"], ["c"], ["d"]]


def test_flushing_waits_for_ends_of_sessions_and_not_for_completions() -> None:
    actor = Actor(lambda call: 3600.0)

    async def scenario(channel: ClientChannel) -> None:
        hanging = asyncio.ensure_future(channel.send(request(0)))
        await asyncio.sleep(1)
        channel.end_session("a")
        await channel.flush()
        assert [batch.ended for batch in actor.batches] == [[], ["a"]]
        assert asyncio.get_running_loop().time() < 1.1
        hanging.cancel()

    run_with(actor, scenario)


@pytest.mark.parametrize("break_it", [lambda actor: setattr(actor, "is_dead", True), Actor.restart])
def test_open_requests_fail_when_the_server_is_lost_and_later_requests_open_a_new_channel(
    break_it: Callable[[Actor], None],
) -> None:
    actor = Actor(lambda call: 10.0)

    async def lost(channel: ClientChannel, call: int) -> None:
        with pytest.raises(ChannelLost):
            await channel.send(request(call))

    async def breaks(channel: ClientChannel) -> None:
        await asyncio.sleep(1)
        server_channels = list(actor.channels.values())
        break_it(actor)
        for server_channel in server_channels:
            server_channel.close()
        await lost(channel, 20)

    async def scenario(channel: ClientChannel) -> None:
        await run_together([*(lost(channel, call) for call in range(20)), breaks(channel)])
        channel.end_session("it is gone with the server")
        await channel.flush()
        actor.is_dead = False
        assert await channel.send(request(21)) == response(21)
        assert actor.batches[-1].number == 0

    run_with(actor, scenario)


def test_closing_fails_open_requests_and_ends_all_exchanges() -> None:
    actor = Actor(lambda call: 3600.0)

    async def main() -> None:
        channel = channel_to(actor)
        waiting = asyncio.ensure_future(channel.send(request(1)))
        await asyncio.sleep(1)
        await channel.close()
        with pytest.raises(ChannelLost, match="closed"):
            await waiting
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


def test_an_error_of_an_exchange_is_raised_by_the_open_requests() -> None:
    async def fails(_: bytes) -> bytes:
        raise ValueError("an unexpected reply")

    async def main() -> None:
        channel = ClientChannel(
            open_channel=Actor().open_channel, exchange=fails, on_responses=lambda _: None
        )
        with pytest.raises(ChannelLost, match="ValueError: an unexpected reply"):
            await channel.send(request(1))

    run_virtual(main())
