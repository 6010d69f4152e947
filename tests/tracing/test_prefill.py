"""Time to the first token: reported by servers or measured from streams, and recorded on the span."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from agent_loop.runtime.activity import ActivityMonitor, WaitKind
from agent_loop.servers.base import Ability
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory.codec import decode_completion, encode_completion
from agent_loop.types import TokenChunk, TokenOutput

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


def test_the_prefill_time_is_serialized_and_ignored_by_equality() -> None:
    output = TokenOutput([1, 2], [-0.1, -0.2], "stop", prefill_s=0.25)
    assert decode_completion(encode_completion(output)).prefill_s == 0.25
    assert TokenOutput.from_chunks(output.chunks).prefill_s == 0.25
    assert output == TokenOutput([1, 2], [-0.1, -0.2], "stop", prefill_s=9.0)
