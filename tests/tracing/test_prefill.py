"""Time to the first token: reported by servers or measured from streams, and recorded on the span."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from agent_loop.distributed.messages import PackedCompletion
from agent_loop.runtime.activity import ActivityMonitor, WaitKind
from agent_loop.servers.base import Ability
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.simulation.engine import EngineModel
from agent_loop.simulation.server import SimulatedServer
from agent_loop.testing import run_virtual
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput

PROMPT = np.arange(100, dtype=np.int32)


class SilentServer(ScriptedServer):
    """Server that streams without reporting the prefill time."""

    async def stream(self, *args: Any, **kwargs: Any) -> Any:
        for token in (1, 2, 3):
            await asyncio.sleep(0.5)
            yield TokenChunk([token], [-0.5], stop_reason="stop" if token == 3 else None)


def details_of(*servers: Any) -> dict[str, Any]:
    """Return the details of the span of one completion."""

    async def main() -> dict[str, Any]:
        with ActivityMonitor().trajectory("group=0") as activity:
            manager = AsyncLLMServerManager(servers)
            await manager.generate("one", prompt_ids=PROMPT, sampling_params={})
        [span] = [span for span in activity.spans if span.kind == WaitKind.GENERATE]
        return dict(span.details)

    return run_virtual(main())


@pytest.mark.parametrize("streams", [False, True])
def test_the_prefill_time_that_a_server_reports_is_used(streams: bool) -> None:
    replies = [ScriptedReply([1, 2, 3, 4], latency_s=2.0)]
    servers = [ScriptedServer(replies, name=f"scripted-{n}", streams=streams) for n in range(2)]
    assert details_of(*servers)["prefill_s"] == 0.5


def test_the_first_chunk_is_timed_if_the_server_reports_no_prefill_time() -> None:
    servers = [SilentServer([], name=f"silent-{n}", streams=True) for n in range(2)]
    assert Ability.STREAMING in servers[0].abilities
    assert details_of(*servers)["prefill_s"] == 0.5


def test_the_prefill_time_of_a_simulated_engine_includes_queueing() -> None:
    def next_tokens(prompt_ids: IntArray, session: str) -> list[int]:
        return [1] * 10

    async def main() -> list[TokenOutput]:
        model = EngineModel(prefill_tokens_per_s=100.0, step_s=0.01, step_s_per_request=0.0)
        server = SimulatedServer(next_tokens, model=model)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(server.generate(PROMPT, SamplingParams(), name)) for name in "ab"]
        return [task.result() for task in tasks]

    first, second = run_virtual(main())
    assert first.prefill_s == pytest.approx(1.01, abs=0.02)
    assert second.prefill_s == pytest.approx(2.01, abs=0.02)


def test_the_prefill_time_is_serialized_and_ignored_by_equality() -> None:
    output = TokenOutput([1, 2], [-0.1, -0.2], "stop", prefill_s=0.25)
    assert PackedCompletion.pack(output).unpack().prefill_s == 0.25
    assert TokenOutput.from_chunks(output.chunks).prefill_s == 0.25
    assert output == TokenOutput([1, 2], [-0.1, -0.2], "stop", prefill_s=9.0)
