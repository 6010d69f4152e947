"""Metrics of a rollout as Prometheus reads them, and the page that lists all metrics."""

from __future__ import annotations

import asyncio
import importlib.util
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent_loop.config import TraceConfig
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import timing_metrics
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.training.evaluation.scores import summarise
from agent_loop.training.step_metrics import feedback_metrics, rollout_metrics
from tests.helpers import encoded, text_reply
from tests.tracing.harness import ADDS, ROWS, manager_of, run


async def scraped(manager: AgentLoopManager) -> dict[str, float]:
    """Return the samples by name and labels, without the prefix that they share."""
    assert manager.metrics is not None
    url = f"http://127.0.0.1:{manager.metrics.port}/metrics"

    def read() -> str:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()

    samples = [s for f in text_string_to_metric_families(await asyncio.to_thread(read)) for s in f.samples]
    labels = [",".join(f"{k}={v}" for k, v in s.labels.items()) for s in samples]
    return {
        f"{s.name.removeprefix('agent_loop_')}{{{own}}}": s.value
        for s, own in zip(samples, labels, strict=True)
    }


async def test_ended_trajectories_are_counted() -> None:
    async with manager_of(ScriptedServer(ADDS), metrics_port=0) as manager:
        trajectories = await manager.run(ROWS, n=4)
        samples = await scraped(manager)
    num_tokens = sum(int(t.output.response_mask.sum()) for t in trajectories)
    assert samples["trajectories_ended_total{stop_reason=answered}"] == 4
    assert samples["completion_tokens_total{}"] == num_tokens
    assert samples["tool_calls_total{tool=add}"] == 4
    assert samples["spans_total{kind=tool}"] == 4
    assert 0.008 <= samples["span_seconds_total{kind=tool}"] < 10
    assert samples["trajectories{state=in_flight}"] == 0


async def test_running_and_waiting_trajectories_are_reported_during_a_run() -> None:
    server = ScriptedServer(lambda request: ScriptedReply(encoded("slow"), latency_s=30.0))
    async with (
        manager_of(server, metrics_port=0, max_concurrent=2) as manager,
        asyncio.TaskGroup() as group,
    ):
        task = group.create_task(manager.run(ROWS, n=5))
        while server.num_running < 2:  # noqa: ASYNC110  (the rollout begins)
            await asyncio.sleep(0.01)
        samples = await scraped(manager)
        task.cancel()
        await asyncio.wait([task])
        after = await scraped(manager)
    assert samples["trajectories{state=in_flight}"] == 2
    assert samples["trajectories{state=held_back}"] == 3
    assert samples["in_flight{server=scripted-0}"] == 2
    assert after["trajectories{state=in_flight}"] == 0
    assert after["in_flight{server=scripted-0}"] == 0


async def test_a_lost_server_its_failovers_and_the_weight_versions_are_reported() -> None:
    def script(request: Any) -> ScriptedReply:
        is_whole = not any(server.num_sessions > 4 for server in servers)
        return text_reply("hi", latency_s=0.2 if is_whole else 0.0)

    servers = [ScriptedServer(script, name=name) for name in ("one", "two")]
    async with manager_of(*servers, metrics_port=0) as manager, asyncio.TaskGroup() as group:
        await manager.update_weights([], weight_version=7)
        task = group.create_task(manager.run(ROWS, n=4))
        while not servers[0].num_running:  # noqa: ASYNC110  (the rollout begins)
            await asyncio.sleep(0.01)
        servers[0].die()
        await task
        await manager.server_manager.pool.health()
        samples = await scraped(manager)
    assert samples["server_alive{server=one}"] == 0
    assert samples["server_alive{server=two}"] == 1
    assert samples["servers_lost{}"] == 1
    assert samples["failovers_total{}"] >= 1
    assert samples["weight_version{server=two}"] == 7
    assert samples["trajectories_ended_total{stop_reason=answered}"] == 4


async def test_traces_that_were_not_written_are_counted() -> None:
    trace = TraceConfig(backend="file", path="/dev/full")
    async with manager_of(ScriptedServer(ADDS), trace=trace, metrics_port=0) as manager:
        await manager.run(ROWS, n=2)
        await asyncio.to_thread(manager.tracing.close)
        samples = await scraped(manager)
    assert samples["traces_dropped_total{writer=file}"] == 2


async def test_the_error_for_a_taken_port_names_its_setting() -> None:
    async with manager_of(ScriptedServer(ADDS), metrics_port=0) as manager:
        assert manager.metrics is not None
        other = manager_of(ScriptedServer(ADDS), metrics_port=manager.metrics.port)
        with pytest.raises(ConfigError, match=r"rollout\.metrics_port is"):
            await other.start()


def test_the_metrics_page_matches_its_generator_and_lists_every_metric_of_a_step() -> None:
    page = Path(__file__).parents[2] / "docs" / "generate_metrics.py"
    spec = importlib.util.spec_from_file_location("generate_metrics", page)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text(encoding="utf-8") == module.render()

    trajectories = run(TraceConfig(), runs=[{"n": 2}])
    metrics = rollout_metrics(trajectories, success_threshold=1.0, weight_version=0)
    metrics |= timing_metrics(trajectories) | feedback_metrics(trajectories)
    metrics |= summarise(trajectories, success_threshold=1.0).metrics()
    known = module.step_metrics()
    prefixes = tuple(name for name in known if name.endswith("/"))
    assert len(metrics) > 30
    assert not [name for name in metrics if name not in known and not name.startswith(prefixes)]
