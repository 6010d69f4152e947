"""Spans of user code and of prefills, metrics as Prometheus reads them, and the page that lists all metrics."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent_loop.config import TraceConfig
from agent_loop.errors import ConfigError
from agent_loop.integrations.verl import rollout_trace_attr, rollout_trace_op
from agent_loop.rollout.batch import timing_metrics
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.runtime.activity import ActivityMonitor, WaitKind, waiting_for
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.base import Ability
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.tracing.bounded import MAX_CHARACTERS
from agent_loop.training.evaluation.scores import summarise
from agent_loop.training.step_metrics import feedback_metrics, rollout_metrics
from agent_loop.trajectory import Span
from agent_loop.trajectory.codec import decode_completion, encode_completion
from agent_loop.types import TokenChunk, TokenOutput
from tests.helpers import encoded, text_reply
from tests.tracing.harness import ADDS, ROWS, manager_of, run


class Thinker:
    @rollout_trace_op
    async def think(self, about: str, *, seconds: float = 1.0) -> str:
        """Thinks."""
        await asyncio.sleep(seconds)
        return self.conclude(about)

    @rollout_trace_op
    def conclude(self, about: str) -> str:
        return f"{about}!"

    @rollout_trace_op
    async def fail(self) -> None:
        raise ValueError("no idea")


def spans_of(what: Any, kind: WaitKind = WaitKind.USER) -> list[Span]:
    """Return the spans of a kind of a trajectory that runs the given coroutine function."""

    async def main() -> tuple[Span, ...]:
        with ActivityMonitor().trajectory("group=0") as activity:
            await what()
        return activity.trace().spans

    return [span for span in run_virtual(main()) if span.kind == kind]


def test_a_call_is_a_span_with_its_inputs_its_output_and_its_time() -> None:
    inner, outer = spans_of(lambda: Thinker().think("tea", seconds=2.0))
    assert (outer.name, outer.seconds) == ("Thinker.think", 2.0)
    assert outer.details["inputs"] == {"about": "tea", "seconds": 2.0}
    assert outer.details["output"] == "tea!"
    assert inner.name == "Thinker.conclude"


def test_a_span_has_its_parent_even_with_concurrent_spans() -> None:
    async def many() -> None:
        await asyncio.gather(*(Thinker().think(f"tea {n}") for n in range(3)))

    spans = spans_of(many)
    outer = {span.details["span"]: span for span in spans if span.name == "Thinker.think"}
    inner = [span for span in spans if span.name == "Thinker.conclude"]
    assert [outer[span.details["within"]].details["inputs"]["about"] for span in inner] == [
        span.details["inputs"]["about"] for span in inner
    ]
    assert all("within" not in span.details for span in outer.values())


def test_spans_in_a_tool_are_nested_in_its_span_even_in_a_thread() -> None:
    async def in_tool() -> None:
        with waiting_for(WaitKind.TOOL, "teapot") as details:
            await run_in_thread(Thinker().conclude, "tea")
        tool.append(details["span"])

    tool: list[int] = []
    [span] = spans_of(in_tool)
    assert [span.details["within"]] == tool
    assert span.details["output"] == "tea!"


def test_an_exception_is_recorded_on_the_span_and_raised() -> None:
    async def fails() -> None:
        with pytest.raises(ValueError, match="no idea"):
            await Thinker().fail()

    [span] = spans_of(fails)
    assert span.details["error"] == "ValueError: no idea"


def test_rollout_trace_attr_records_a_span_and_trace_false_disables_spans() -> None:
    async def run() -> None:
        with rollout_trace_attr(sample_index=3, step=7, rollout_n=1, name="tea", validate=True):
            await Thinker().think("milk")
        with rollout_trace_attr(trace=False):
            await Thinker().think("nothing")

    *inner, outer = spans_of(run)
    assert outer.name == "tea"
    assert outer.details["attributes"] == {"sample_index": 3, "step": 7, "rollout_n": 1, "validate": True}
    assert [span.name for span in inner] == ["Thinker.conclude", "Thinker.think"]
    assert inner[1].details["within"] == outer.details["span"]


def test_recorded_values_are_bounded_and_json() -> None:
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    @rollout_trace_op
    def swallow(*values: Any) -> Any:
        return values

    async def run() -> None:
        swallow("x" * 100_000, list(range(100_000)), Rude(), float("nan"), {"deep": {"deeper": [[[[1]]]]}})

    [span] = spans_of(run)
    text, numbers, rude, nan, deep = span.details["output"]
    assert len(text) < MAX_CHARACTERS + 50
    assert numbers[-1] == "... (100000 in all)"
    assert rude.startswith("<Rude instance")
    assert nan is None
    assert deep == {"deep": {"deeper": ["[[[1]]]"]}}


def test_decorated_functions_work_unchanged_outside_a_rollout() -> None:
    assert asyncio.run(Thinker().think("tea", seconds=0.0)) == "tea!"
    assert Thinker().conclude("tea") == "tea!"
    assert inspect.iscoroutinefunction(Thinker.think)
    assert Thinker.think.__doc__ == "Thinks."
    with rollout_trace_attr(step=1):
        pass


class SilentServer(ScriptedServer):
    """Server that streams without reporting the prefill time."""

    async def stream(self, *args: Any, **kwargs: Any) -> Any:
        for token in (1, 2, 3):
            await asyncio.sleep(0.5)
            yield TokenChunk([token], [-0.5], stop_reason="stop" if token == 3 else None)


@pytest.mark.parametrize(
    ("kind", "streams"), [(ScriptedServer, False), (ScriptedServer, True), (SilentServer, True)]
)
def test_the_prefill_time_is_reported_by_the_server_or_that_of_the_first_chunk(
    kind: type[ScriptedServer], streams: bool
) -> None:
    replies = [ScriptedReply([1, 2, 3, 4], latency_s=2.0)]
    servers = [kind(replies, name=f"scripted-{n}", streams=streams) for n in range(2)]
    assert (Ability.STREAMING in servers[0].abilities) == streams

    async def generate() -> None:
        prompt_ids = np.arange(100, dtype=np.int32)
        await AsyncLLMServerManager(servers).generate("one", prompt_ids=prompt_ids, sampling_params={})

    [span] = spans_of(generate, WaitKind.GENERATE)
    assert span.details["prefill_s"] == 0.5


def test_the_prefill_time_is_serialized_and_ignored_by_equality() -> None:
    output = TokenOutput([1, 2], [-0.1, -0.2], "stop", prefill_s=0.25)
    assert decode_completion(encode_completion(output)).prefill_s == 0.25
    assert TokenOutput.from_chunks(output.chunks).prefill_s == 0.25
    assert output == TokenOutput([1, 2], [-0.1, -0.2], "stop", prefill_s=9.0)


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
