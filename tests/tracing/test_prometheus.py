"""Metrics of a rollout as Prometheus reads them."""

from __future__ import annotations

import asyncio
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent_loop.config import TraceConfig
from agent_loop.errors import ConfigError, ToolError
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from tests.helpers import encoded, hermes_template, text_reply, user
from tests.tracing.harness import ADDS, settings

assert ToolError


async def scraped(manager: AgentLoopManager) -> dict[str, float]:
    """Return the samples by name and labels."""
    assert manager.metrics is not None
    url = f"http://127.0.0.1:{manager.metrics.port}/metrics"

    def read() -> str:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()

    families = text_string_to_metric_families(await asyncio.to_thread(read))
    return {
        f"{s.name}{{{','.join(f'{k}={v}' for k, v in s.labels.items())}}}": s.value
        for f in families
        for s in f.samples
    }


def manager_of(*servers: ScriptedServer, **rollout: Any) -> AgentLoopManager:
    config = settings(rollout.pop("trace", TraceConfig()), metrics_port=0, **rollout)
    return AgentLoopManager(config, servers=servers, template=hermes_template())


ROWS = [{"raw_prompt": user("What is 1 + 2?")}]


def test_ended_trajectories_are_counted() -> None:
    async def main() -> None:
        async with manager_of(ScriptedServer(ADDS)) as manager:
            trajectories = await manager.run(ROWS, n=4)
            samples = await scraped(manager)
        num_tokens = sum(int(t.output.response_mask.sum()) for t in trajectories)
        assert samples["agent_loop_trajectories_ended_total{stop_reason=answered}"] == 4
        assert samples["agent_loop_completion_tokens_total{}"] == num_tokens
        assert samples["agent_loop_tool_calls_total{tool=add}"] == 4
        assert samples["agent_loop_spans_total{kind=tool}"] == 4
        assert 0.008 <= samples["agent_loop_span_seconds_total{kind=tool}"] < 10
        assert samples["agent_loop_trajectories{state=in_flight}"] == 0

    asyncio.run(main())


def test_running_and_waiting_trajectories_are_reported_during_a_run() -> None:
    async def main() -> None:
        server = ScriptedServer(lambda request: ScriptedReply(encoded("slow"), latency_s=30.0))
        async with manager_of(server, max_concurrent=2) as manager, asyncio.TaskGroup() as group:
            task = group.create_task(manager.run(ROWS, n=5))
            while server.num_running < 2:  # noqa: ASYNC110  (the rollout begins)
                await asyncio.sleep(0.01)
            samples = await scraped(manager)
            task.cancel()
            await asyncio.wait([task])
            after = await scraped(manager)
        assert samples["agent_loop_trajectories{state=in_flight}"] == 2
        assert samples["agent_loop_trajectories{state=held_back}"] == 3
        assert samples["agent_loop_in_flight{server=scripted-0}"] == 2
        assert after["agent_loop_trajectories{state=in_flight}"] == 0
        assert after["agent_loop_in_flight{server=scripted-0}"] == 0

    asyncio.run(main())


def test_a_lost_server_its_failovers_and_the_weight_versions_are_reported() -> None:
    async def main() -> None:
        def script(request: Any) -> ScriptedReply:
            if not any(server.num_sessions > 4 for server in servers):
                return text_reply("hi", latency_s=0.2)
            return text_reply("hi")

        servers = [ScriptedServer(script, name=name) for name in ("one", "two")]
        async with manager_of(*servers) as manager, asyncio.TaskGroup() as group:
            await manager.update_weights([], weight_version=7)
            task = group.create_task(manager.run(ROWS, n=4))
            while not servers[0].num_running:  # noqa: ASYNC110  (the rollout begins)
                await asyncio.sleep(0.01)
            servers[0].die()
            await task
            await manager.server_manager.pool.health()
            samples = await scraped(manager)
        assert samples["agent_loop_server_alive{server=one}"] == 0
        assert samples["agent_loop_server_alive{server=two}"] == 1
        assert samples["agent_loop_servers_lost{}"] == 1
        assert samples["agent_loop_failovers_total{}"] >= 1
        assert samples["agent_loop_weight_version{server=two}"] == 7
        assert samples["agent_loop_trajectories_ended_total{stop_reason=answered}"] == 4

    asyncio.run(main())


def test_traces_that_were_not_written_are_counted() -> None:
    async def main() -> None:
        trace = TraceConfig(backend="file", path="/dev/full")
        async with manager_of(ScriptedServer(ADDS), trace=trace) as manager:
            await manager.run(ROWS, n=2)
            await asyncio.to_thread(manager.tracing.close)
            samples = await scraped(manager)
        assert samples["agent_loop_traces_dropped_total{writer=file}"] == 2

    asyncio.run(main())


def test_the_error_for_a_taken_port_names_its_setting() -> None:
    async def main() -> None:
        async with manager_of(ScriptedServer(ADDS)) as manager:
            assert manager.metrics is not None
            config = settings(TraceConfig(), metrics_port=manager.metrics.port)
            other = AgentLoopManager(config, servers=[ScriptedServer(ADDS)], template=hermes_template())
            with pytest.raises(ConfigError, match=r"rollout\.metrics_port is"):
                await other.start()

    asyncio.run(main())
