"""Tests of the client of all servers: start, time limits, failover, the queue, and runs on simulated engines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from simulation.cluster import PolicyName, SimulatedCluster, run_cluster, simulate
from simulation.engine import EngineModel
from simulation.report import MakespanBounds, SimulationReport
from simulation.server import SimulatedServer
from simulation.workload import Workload

from agent_loop.errors import FatalRequest, ServerDied, ServerTimeout
from agent_loop.rollout.failures import failure_of
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.base import AsyncServerBase, ServerHealth
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.pool import ServerPool
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput, as_token_ids

pytestmark = pytest.mark.virtual_time

COUNTED = list(range(101, 111))


def count_up(request: ScriptedRequest) -> ScriptedReply:
    """Count from the token after the prompt's last one, one token per second."""
    last = int(request.prompt_ids[-1])
    number = request.sampling_params.max_tokens or 1
    return ScriptedReply(range(last + 1, last + 1 + number), latency_s=number, stops=False)


def two_servers(
    server_class: Any = ScriptedServer, **options: Any
) -> tuple[list[ScriptedServer], AsyncLLMServerManager]:
    servers = [server_class(count_up, name=name, **options) for name in ("a", "b")]
    return servers, AsyncLLMServerManager(servers)


async def complete(
    manager: AsyncLLMServerManager, session: str = "s", *, num_tokens: int = 10
) -> TokenOutput:
    return await manager.generate(session, prompt_ids=[100], sampling_params={"max_tokens": num_tokens})


def assert_idle(manager: AsyncLLMServerManager) -> None:
    assert (manager.pool.balancer.num_leases, manager.pool.balancer.num_queued) == (0, 0)


async def test_a_hung_completion_fails_at_its_time_limit_and_releases_its_lease() -> None:
    server = ScriptedServer([ScriptedReply([1], latency_s=math.inf)], name="gpu-1")
    manager = AsyncLLMServerManager([server], request_timeout_s=30)
    with pytest.raises(ServerTimeout, match=r"server gpu-1 request s: the completion took longer than 30 s"):
        await complete(manager)
    assert server.num_running == 0
    assert_idle(manager)


async def test_all_engines_are_closed_if_one_does_not_start() -> None:
    class Broken(ScriptedServer):
        async def start(self) -> None:
            raise ServerDied("no memory", server=self.name)

    good = ScriptedServer([])
    with pytest.raises(ServerDied, match="server gpu-7: no memory"):
        await ServerPool([good, Broken([], name="gpu-7")]).start()
    assert not (await good.health()).is_alive


async def test_a_server_that_defines_only_stream_also_returns_whole_completions() -> None:
    class StreamsOnly(AsyncServerBase):
        async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[TokenChunk]:
            yield TokenChunk([1], [-0.5])
            yield TokenChunk([2], [-0.25], stop_reason="stop")

    server = StreamsOnly()
    output = await server.generate(as_token_ids([5]), SamplingParams(), "a")
    assert (output.token_ids, output.log_probs, output.stop_reason) == ([1, 2], [-0.5, -0.25], "stop")
    assert (await complete(AsyncLLMServerManager([server]), "b")).token_ids == [1, 2]


# -- failover ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False])
async def test_another_server_resumes_the_completion_of_a_dead_server(streams: bool) -> None:
    servers, manager = two_servers(streams=streams)
    task = asyncio.ensure_future(complete(manager))
    await asyncio.sleep(6.5)
    home, other = sorted(servers, key=lambda server: -server.num_running)
    home.die()
    output = await task
    assert output.token_ids == COUNTED
    assert (output.stop_reason, output.num_preempted) == ("length", 1)
    # six tokens were streamed before the server died
    assert asyncio.get_running_loop().time() == pytest.approx(10.5 if streams else 16.5)
    assert other.requests[-1].prompt_ids.tolist() == list(range(100, 107) if streams else [100])
    assert manager.pool.balancer.servers == (other.name,)
    assert other.num_running == 0
    assert_idle(manager)


@pytest.mark.parametrize(("num_tokens", "reason"), [(3, None), (10, "stop")])
async def test_a_completion_that_was_complete_when_its_server_died_is_kept(
    num_tokens: int, reason: Any
) -> None:
    class DiesAtTheEnd(ScriptedServer):
        async def stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[TokenChunk]:
            yield TokenChunk([7, 8, 9], [-0.5] * 3, weight_version=4, stop_reason=reason)
            raise ServerDied("the engine was killed", server=self.name)

    output = await complete(two_servers(DiesAtTheEnd, streams=True)[1], num_tokens=num_tokens)
    request: dict[str, Any] = {"prompt_ids": [100], "sampling_params": {"max_tokens": num_tokens}}
    manager = two_servers(DiesAtTheEnd, streams=True)[1]
    streamed = [chunk async for chunk in manager.stream("s", **request)]
    wanted = TokenOutput([7, 8, 9], [-0.5] * 3, reason or "length", weight_version=4)
    assert output == TokenOutput.from_chunks(streamed) == wanted


async def test_the_error_names_every_dead_server_when_none_is_left() -> None:
    servers, manager = two_servers()
    for server in servers:
        server.die(f"{server.name} has no memory")
    with pytest.raises(ServerDied, match=r"server . request s: . has no memory"):
        await complete(manager)
    with pytest.raises(ServerDied, match=r"no server is left \(.*a has no memory.*b has no memory"):
        await complete(manager)
    with pytest.raises(ServerDied, match="no server is left"):
        await manager.pool.update_weights([], weight_version=1)


class Restarts(ScriptedServer):
    restarts = True


def restarting_servers(*, streams: bool = False) -> tuple[list[ScriptedServer], AsyncLLMServerManager]:
    servers: list[Any] = [Restarts(count_up, name=name, streams=streams) for name in ("a", "b")]
    return servers, AsyncLLMServerManager(ServerPool(servers, restart_timeout_s=60))


@pytest.mark.parametrize("streams", [False, True])
async def test_requests_wait_for_a_restart_when_every_server_died(streams: bool) -> None:
    """Applies to in-flight, queued and later requests."""
    servers, manager = restarting_servers(streams=streams)
    async with manager.pool.watching(), asyncio.TaskGroup() as group:
        tasks = [group.create_task(complete(manager, f"s{n}")) for n in range(4)]
        await asyncio.sleep(0)
        for server in servers:
            server.die()
        tasks.append(group.create_task(complete(manager, "later")))
        await asyncio.sleep(20)
        assert not any(task.done() for task in tasks)
        servers[1].revive()
    assert [task.result().token_ids for task in tasks] == [COUNTED] * 5
    assert_idle(manager)


async def test_requests_fail_when_no_server_restarts_in_time() -> None:
    servers, manager = restarting_servers()
    clock = asyncio.get_running_loop().time
    for server in servers:
        server.die()
    async with manager.pool.watching():
        for number in (1, 2):
            with pytest.raises(ServerDied, match="no server is left"):
                await complete(manager)
            assert clock() == pytest.approx(60 * number)
    assert_idle(manager)


@pytest.mark.parametrize("is_update", [False, True])
async def test_a_call_to_all_servers_waits_for_a_restart_when_every_server_died(is_update: bool) -> None:
    servers, manager = restarting_servers()
    pool = manager.pool
    for server in servers:
        server.die()
    call = pool.update_weights([], weight_version=3) if is_update else pool.wake_up()
    async with asyncio.TaskGroup() as group:
        calling = group.create_task(call)
        await asyncio.sleep(20)
        assert not calling.done()
        servers[0].revive()
    assert pool.balancer.servers == ("a",)
    if is_update:
        assert next(health.weight_version for health in await pool.health()) == 3


async def test_a_request_that_kills_servers_fails_and_takes_no_more_than_two_with_it() -> None:
    class DiesOnRequest(ScriptedServer):
        async def stream(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[TokenChunk]:
            if prompt_ids[-1] == 66:
                raise ServerDied("killed by the request", server=self.name)
            async for chunk in super().stream(prompt_ids, *args, **kwargs):
                yield chunk

    pool = ServerPool([DiesOnRequest(count_up, name=name) for name in "abcd"])
    manager = AsyncLLMServerManager(pool)
    async with pool.watching(), asyncio.TaskGroup() as group:
        others = [group.create_task(complete(manager, f"s{n}")) for n in range(8)]
        with pytest.raises(FatalRequest, match="killed by the request") as raised:
            await manager.generate("fatal", prompt_ids=[66], sampling_params={})
        assert len(pool.lost) == 2
        assert not failure_of(raised.value).is_retried
    assert [task.result().token_ids for task in others] == [COUNTED] * 8
    assert pool.lost == {}


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
    assert [output.token_ids for output in outputs] == [COUNTED] * 8
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
    assert [output.token_ids for output in outputs] == [COUNTED] * 4
    assert manager.pool.balancer.servers == ("good",)


async def test_a_server_forgets_the_sessions_that_ended_or_moved_while_it_was_lost() -> None:
    ended: list[tuple[str, str]] = []

    class Records(ScriptedServer):
        def end_session(self, request_id: str) -> None:
            ended.append((self.name, request_id))

    _, manager = two_servers(Records)
    with manager.scope() as scope:
        for number in range(4):
            await complete(scope, f"s{number}", num_tokens=1)
        homes = {(manager.pool.balancer.server_of(f"s{n}"), f"s{n}") for n in range(4)}
        manager.pool.mark_lost("a", reason="its health check took too long")
    assert "a" not in {name for name, _ in ended}
    async with manager.pool.watching():
        await asyncio.sleep(1)
    assert {each for each in ended if each[0] == "a"} == {each for each in homes if each[0] == "a"}


async def test_sessions_of_other_servers_do_not_move_when_a_server_dies() -> None:
    servers, manager = two_servers()
    sessions = [f"s{number}" for number in range(10)]
    for session in sessions:
        await complete(manager, session, num_tokens=1)
    homes = {session: manager.pool.balancer.server_of(session) for session in sessions}
    servers[0].die()
    for session in sessions:
        await complete(manager, session, num_tokens=1)
    assert {manager.pool.balancer.server_of(session) for session in sessions} == {"b"}
    assert len([r for r in servers[1].requests if homes[r.request_id] == "b"]) == 2 * 5


@pytest.mark.parametrize("has_old_weights", [False, True])
async def test_a_lost_server_rejoins_once_it_is_healthy_and_has_the_weights(has_old_weights: bool) -> None:
    servers, manager = two_servers()
    pool = manager.pool
    if has_old_weights:
        await pool.update_weights([], weight_version=1)
    servers[0].die()
    async with pool.watching():
        await asyncio.sleep(20)
        assert pool.balancer.servers == ("b",)
        servers[0].revive()
        await asyncio.sleep(20)
        if has_old_weights:
            assert pool.balancer.servers == ("b",)
            await pool.update_weights([], weight_version=2)
        assert set(pool.balancer.servers) == {"a", "b"}
    assert [health.weight_version for health in await pool.health()] == [2 * has_old_weights] * 2


# -- the queue ---------------------------------------------------------------------------------------------------------


async def test_requests_beyond_the_slots_of_all_servers_are_queued() -> None:
    servers, manager = two_servers(max_concurrent=2)
    async with asyncio.TaskGroup() as group:
        for number in range(12):
            group.create_task(complete(manager, f"s{number}"))
        await asyncio.sleep(1)
        assert [server.num_running for server in servers] == [2, 2]
        assert manager.pool.balancer.num_queued == 8
    assert asyncio.get_running_loop().time() == pytest.approx(30)
    assert_idle(manager)


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
        with pytest.raises(ServerTimeout, match="longer than 30 s"):
            await complete(manager, "late", num_tokens=2)
    assert server.num_running == 0
    assert_idle(manager)


# -- simulated engines -------------------------------------------------------------------------------------------------

SMALL = SimulatedCluster(num_servers=4, model=EngineModel(max_concurrent=8, kv_tokens=200_000))


@pytest.mark.parametrize("policy", list(PolicyName))
def test_every_policy_completes_every_trajectory(policy: PolicyName) -> None:
    plans = Workload(num_trajectories=100).plans()
    cluster = replace(SMALL, policy=policy)
    bounds = MakespanBounds.of(plans, model=cluster.model, capacity=cluster.capacity)
    ideal_s = simulate(SMALL.perfect(), plans).makespan_s
    report = SimulationReport.of(simulate(cluster, plans), bounds=bounds, perfect_s=ideal_s)
    assert (report.num_trajectories, report.num_failed) == (100, 0)
    assert report.to_bound > 1
    assert report.latency_s["p50"] <= report.latency_s["p99"] <= report.makespan_s
    if policy in (PolicyName.STICKY_HASH, PolicyName.VERL):
        assert report.prefix_hit_rate > 0.99


async def test_cancelling_a_thousand_trajectories_releases_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers: list[SimulatedServer] = []
    make = SimulatedServer.__init__

    def remember(self: SimulatedServer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        servers.append(self)

    monkeypatch.setattr(SimulatedServer, "__init__", remember)
    cluster = SimulatedCluster(num_servers=4, model=EngineModel(max_concurrent=250))
    run = asyncio.ensure_future(run_cluster(cluster, Workload(num_trajectories=1200).plans()))
    await asyncio.sleep(5)
    assert sum(server.num_running for server in servers) > 500
    began = asyncio.get_running_loop().time()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert asyncio.get_running_loop().time() - began < 1
    assert [(server.num_running, server.engine.num_running) for server in servers] == [(0, 0)] * 4
    assert len(asyncio.all_tasks()) == 1
