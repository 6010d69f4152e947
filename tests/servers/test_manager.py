"""Tests of the client of all servers: start, time limits, failover and the queue."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest

from agent_loop.errors import FatalRequest, ServerDied, ServerTimeout
from agent_loop.rollout.failures import failure_of
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.base import AsyncServerBase, ServerHealth
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.pool import ServerPool
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput, as_token_ids

pytestmark = pytest.mark.virtual_time


async def test_a_hung_completion_fails_at_its_time_limit_and_releases_its_lease() -> None:
    server = ScriptedServer([ScriptedReply([1], latency_s=math.inf)], name="gpu-1")
    manager = AsyncLLMServerManager([server], request_timeout_s=30)

    with pytest.raises(ServerTimeout, match=r"server gpu-1 request r1: the completion took longer than 30 s"):
        await manager.generate("r1", prompt_ids=[5], sampling_params={})
    assert (server.num_running, manager.pool.balancer.num_leases) == (0, 0)


async def test_all_engines_are_closed_if_one_does_not_start() -> None:
    class Broken(ScriptedServer):
        async def start(self) -> None:
            raise ServerDied("no memory", server=self.name)

    good = ScriptedServer([])

    with pytest.raises(ServerDied, match="server gpu-7: no memory"):
        await ServerPool([good, Broken([], name="gpu-7")]).start()
    assert not (await good.health()).is_alive


# -- failover ----------------------------------------------------------------------------------------------------------


def count_up(request: ScriptedRequest) -> ScriptedReply:
    """Count from the token after the prompt's last one, one token per second."""
    last = int(request.prompt_ids[-1])
    number = request.sampling_params.max_tokens or 1
    return ScriptedReply(range(last + 1, last + 1 + number), latency_s=number, stops=False)


def two_servers(*, streams: bool, **options: Any) -> tuple[list[ScriptedServer], AsyncLLMServerManager]:
    servers = [ScriptedServer(count_up, name=name, streams=streams, **options) for name in ("a", "b")]
    return servers, AsyncLLMServerManager(servers)


async def complete(
    manager: AsyncLLMServerManager, session: str = "s", *, num_tokens: int = 10
) -> TokenOutput:
    return await manager.generate(session, prompt_ids=[100], sampling_params={"max_tokens": num_tokens})


@pytest.mark.parametrize("streams", [True, False])
async def test_another_server_resumes_the_completion_of_a_dead_server(streams: bool) -> None:
    servers, manager = two_servers(streams=streams)
    clock = asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as group:
        task = group.create_task(complete(manager))
        await asyncio.sleep(6.5)
        home = next(server for server in servers if server.num_running)
        home.die()
    output = task.result()
    assert output.token_ids == list(range(101, 111))
    assert (output.stop_reason, output.num_preempted) == ("length", 1)
    # six tokens were streamed before the server died
    assert clock() == pytest.approx(10.5 if streams else 16.5)
    (other,) = [server for server in servers if server is not home]
    assert other.requests[-1].prompt_ids.tolist() == list(range(100, 107) if streams else [100])
    assert manager.pool.balancer.servers == (other.name,)
    assert (manager.pool.balancer.num_leases, other.num_running) == (0, 0)


@pytest.mark.parametrize(("num_tokens", "has_stop_reason"), [(3, False), (10, True)])
async def test_a_completion_that_was_complete_when_its_server_died_is_kept(
    num_tokens: int, has_stop_reason: bool
) -> None:

    class DiesAtTheEnd(ScriptedServer):
        async def stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[TokenChunk]:
            reason = "stop" if has_stop_reason else None
            yield TokenChunk([7, 8, 9], [-0.5] * 3, weight_version=4, stop_reason=reason)
            raise ServerDied("the engine was killed", server=self.name)

    def servers() -> list[ScriptedServer]:
        return [DiesAtTheEnd([], name=name, streams=True) for name in ("a", "b")]

    output = await complete(AsyncLLMServerManager(servers()), num_tokens=num_tokens)
    request: dict[str, Any] = {"prompt_ids": [100], "sampling_params": {"max_tokens": num_tokens}}
    streamed = [chunk async for chunk in AsyncLLMServerManager(servers()).stream("s", **request)]
    wanted = TokenOutput([7, 8, 9], [-0.5] * 3, "stop" if has_stop_reason else "length", weight_version=4)
    assert output == TokenOutput.from_chunks(streamed) == wanted


async def test_the_error_names_every_dead_server_when_none_is_left() -> None:
    servers, manager = two_servers(streams=False)
    for server in servers:
        server.die(f"{server.name} has no memory")
    with pytest.raises(ServerDied, match=r"server . request s: . has no memory"):
        await complete(manager)
    with pytest.raises(ServerDied, match=r"no server is left \(.*a has no memory.*b has no memory"):
        await complete(manager)
    with pytest.raises(ServerDied, match="no server is left"):
        await manager.pool.update_weights([], weight_version=1)


def restarting_servers(*, streams: bool, restart_timeout_s: float) -> tuple[list[ScriptedServer], ServerPool]:
    class Restarts(ScriptedServer):
        restarts = True

    servers = [Restarts(count_up, name=name, streams=streams) for name in ("a", "b")]
    return list(servers), ServerPool(servers, restart_timeout_s=restart_timeout_s)


@pytest.mark.parametrize("streams", [False, True])
async def test_requests_wait_for_a_restart_when_every_server_died(streams: bool) -> None:
    """Applies to in-flight, queued and later requests."""

    servers, pool = restarting_servers(streams=streams, restart_timeout_s=60)
    manager = AsyncLLMServerManager(pool)
    async with manager.pool.watching(), asyncio.TaskGroup() as group:
        before = [group.create_task(complete(manager, f"s{n}")) for n in range(4)]
        await asyncio.sleep(0)
        for server in servers:
            server.die()
        later = group.create_task(complete(manager, "later"))
        await asyncio.sleep(20)
        assert not any(task.done() for task in (*before, later))
        servers[1].revive()
    assert {tuple(task.result().token_ids) for task in (*before, later)} == {tuple(range(101, 111))}
    assert manager.pool.balancer.num_leases == manager.pool.balancer.num_queued == 0


async def test_requests_fail_when_no_server_restarts_in_time() -> None:
    servers, pool = restarting_servers(streams=False, restart_timeout_s=60)
    manager, clock = AsyncLLMServerManager(pool), asyncio.get_running_loop().time
    for server in servers:
        server.die()
    async with manager.pool.watching():
        for _ in range(2):
            began = clock()
            with pytest.raises(ServerDied, match="no server is left"):
                await complete(manager)
            assert clock() - began == pytest.approx(60)
    assert manager.pool.balancer.num_queued == 0


async def test_a_request_that_kills_servers_fails_and_takes_no_more_than_two_with_it() -> None:
    class DiesOnRequest(ScriptedServer):
        async def stream(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[TokenChunk]:
            if prompt_ids[-1] == 66:
                raise ServerDied("killed by the request", server=self.name)
            async for chunk in super().stream(prompt_ids, *args, **kwargs):
                yield chunk

    servers = [DiesOnRequest(count_up, name=name) for name in "abcd"]
    pool = ServerPool(servers)
    manager = AsyncLLMServerManager(pool)
    async with manager.pool.watching(), asyncio.TaskGroup() as group:
        others = [group.create_task(complete(manager, f"s{n}")) for n in range(8)]
        with pytest.raises(FatalRequest, match="killed by the request") as raised:
            await manager.generate("fatal", prompt_ids=[66], sampling_params={})
        assert len(pool.lost) == 2
        assert not failure_of(raised.value).is_retried
    assert {tuple(task.result().token_ids) for task in others} == {tuple(range(101, 111))}
    assert pool.lost == {}


@pytest.mark.parametrize("call", ["wake_up", "update_weights"])
async def test_a_call_to_all_servers_waits_for_a_restart_when_every_server_died(call: str) -> None:
    servers, pool = restarting_servers(streams=False, restart_timeout_s=60)
    for server in servers:
        server.die()
    is_update = call == "update_weights"
    calls = pool.update_weights([], weight_version=3) if is_update else pool.wake_up()
    async with asyncio.TaskGroup() as group:
        calling = group.create_task(calls)
        await asyncio.sleep(20)
        assert not calling.done()
        servers[0].revive()
    assert pool.balancer.servers == ("a",)
    if is_update:
        assert next(health.weight_version for health in await pool.health()) == 3


async def test_each_request_keeps_the_tokens_with_which_its_dead_server_failed_it() -> None:
    class FailsOneAfterTheOther(ScriptedServer):
        """Sampled two tokens of each request before it died. Its connections break one after the other."""

        async def stream(
            self, prompt_ids: IntArray, sampling_params: SamplingParams, request_id: str, **_: Any
        ) -> AsyncGenerator[TokenChunk]:
            await asyncio.sleep(1 + int(request_id) / 10)
            raise ServerDied("killed", server="a", chunks=[TokenChunk([101, 102], [-0.5, -0.5])])
            yield

        async def health(self) -> ServerHealth:
            return ServerHealth(is_alive=False, num_running=0, num_waiting=0, weight_version=0)

    good = ScriptedServer(count_up, name="b")
    manager = AsyncLLMServerManager([FailsOneAfterTheOther([], name="a"), good])
    outputs = await run_together(complete(manager, str(n)) for n in range(8))
    assert [output.token_ids for output in outputs] == [list(range(101, 111))] * 8
    resumed = [request for request in good.requests if len(request.prompt_ids) == 3]
    assert len(resumed) == sum(output.num_preempted for output in outputs) == 4


async def test_a_hung_server_is_lost_and_its_requests_resume_on_another_one() -> None:
    class Hangs(ScriptedServer):
        async def health(self) -> ServerHealth:
            await asyncio.Event().wait()
            raise AssertionError

    hung = Hangs([ScriptedReply([1], latency_s=math.inf)], name="hung")
    manager = AsyncLLMServerManager([hung, ScriptedServer(count_up, name="good")])
    async with manager.pool.watching():
        outputs = await run_together(complete(manager, f"s{n}") for n in range(4))
    assert {tuple(output.token_ids) for output in outputs} == {tuple(range(101, 111))}
    assert manager.pool.balancer.servers == ("good",)


async def test_a_server_forgets_the_sessions_that_ended_or_moved_while_it_was_lost() -> None:
    ended: list[str] = []

    class Records(ScriptedServer):
        def end_session(self, request_id: str) -> None:
            ended.append(f"{self.name} {request_id}")

    servers = [Records(count_up, name=name) for name in ("a", "b")]
    manager = AsyncLLMServerManager(servers)
    with manager.scope() as scope:
        for number in range(4):
            await complete(scope, f"s{number}", num_tokens=1)
        homes = {f"s{n}": manager.pool.balancer.server_of(f"s{n}") for n in range(4)}
        manager.pool.mark_lost("a", reason="its health check took too long")
    assert "a" not in {each[0] for each in ended}
    async with manager.pool.watching():
        await asyncio.sleep(1)
    assert {each for each in ended if each[0] == "a"} == {
        f"a {s}" for s, home in homes.items() if home == "a"
    }


async def test_a_lost_server_rejoins_once_its_health_check_passes() -> None:
    servers, manager = two_servers(streams=False)
    servers[0].die()
    async with manager.pool.watching():
        await asyncio.sleep(20)
        assert manager.pool.balancer.servers == ("b",)
        servers[0].revive()
        await asyncio.sleep(20)
        assert set(manager.pool.balancer.servers) == {"a", "b"}


async def test_a_restarted_server_with_old_weights_rejoins_at_the_next_update() -> None:
    servers, manager = two_servers(streams=False)
    await manager.pool.update_weights([], weight_version=1)
    servers[0].die()
    async with manager.pool.watching():
        await asyncio.sleep(20)
        servers[0].revive()
        await asyncio.sleep(20)
        assert manager.pool.balancer.servers == ("b",)
        await manager.pool.update_weights([], weight_version=2)
        assert set(manager.pool.balancer.servers) == {"a", "b"}
    assert [health.weight_version for health in await manager.pool.health()] == [2, 2]


# -- the queue ---------------------------------------------------------------------------------------------------------


async def test_requests_beyond_the_slots_of_all_servers_are_queued() -> None:
    servers, manager = two_servers(streams=False, max_concurrent=2)
    clock = asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as group:
        for number in range(12):
            group.create_task(complete(manager, f"s{number}"))
        await asyncio.sleep(1)
        assert [server.num_running for server in servers] == [2, 2]
        assert manager.pool.balancer.num_queued == 8
    assert clock() == pytest.approx(30)
    assert (manager.pool.balancer.num_leases, manager.pool.balancer.num_queued) == (0, 0)


async def test_a_queued_request_can_be_aborted_be_cancelled_or_time_out() -> None:
    server = ScriptedServer(count_up, max_concurrent=1)
    manager = AsyncLLMServerManager([server], request_timeout_s=30)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(complete(manager, "first", num_tokens=25))
        await asyncio.sleep(0)
        aborted = group.create_task(complete(manager, "aborted"))
        cancelled = group.create_task(complete(manager, "cancelled"))
        await asyncio.sleep(1)
        await manager.abort("aborted")
        cancelled.cancel()
    assert (aborted.result().token_ids, aborted.result().stop_reason) == ([], "aborted")
    assert cancelled.cancelled()
    assert len(first.result().token_ids) == 25
    async with asyncio.TaskGroup() as group:
        group.create_task(complete(manager, "long", num_tokens=29))
        await asyncio.sleep(0)
        late = group.create_task(error_of(complete(manager, "late", num_tokens=2)))
    assert isinstance(late.result(), ServerTimeout)
    assert "longer than 30 s" in str(late.result())
    assert (manager.pool.balancer.num_leases, manager.pool.balancer.num_queued, server.num_running) == (
        0,
        0,
        0,
    )


async def error_of(call: Coroutine[Any, Any, Any]) -> BaseException | None:
    """Return the error that a call raises, or None."""
    try:
        await call
    except Exception as error:
        return error
    return None


class StreamsOnly(AsyncServerBase):
    """Server that defines only `stream`."""

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[TokenChunk]:
        yield TokenChunk([1], [-0.5])
        yield TokenChunk([2], [-0.25], stop_reason="stop")


async def test_a_server_that_defines_only_stream_also_returns_whole_completions() -> None:
    server = StreamsOnly()
    output = await server.generate(as_token_ids([5]), SamplingParams(), "a")
    assert (output.token_ids, output.log_probs, output.stop_reason) == ([1, 2], [-0.5, -0.25], "stop")
    assert (await complete(AsyncLLMServerManager([server]), "b")).token_ids == [1, 2]


async def test_sessions_of_other_servers_do_not_move_when_a_server_dies() -> None:
    servers, manager = two_servers(streams=False)
    for number in range(10):
        await complete(manager, f"s{number}", num_tokens=1)
    homes = {f"s{n}": manager.pool.balancer.server_of(f"s{n}") for n in range(10)}
    servers[0].die()
    for session in homes:
        await complete(manager, session, num_tokens=1)
    assert {manager.pool.balancer.server_of(session) for session in homes} == {"b"}
    assert len([r for r in servers[1].requests if homes[r.request_id] == "b"]) == 2 * 5
