"""The client of all servers: starting them, and time limits."""

from __future__ import annotations

import math

import pytest

from agent_loop.errors import ServerDied, ServerTimeout
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.testing import run_virtual


def test_a_completion_that_hangs_fails_at_its_time_limit_and_frees_its_place() -> None:
    server = ScriptedServer([ScriptedReply([1], latency_s=math.inf)], name="gpu-1")
    manager = AsyncLLMServerManager([server], request_timeout_s=30)

    async def main() -> None:
        with pytest.raises(
            ServerTimeout, match=r"server gpu-1 request r1: the completion took longer than 30 s"
        ):
            await manager.generate("r1", prompt_ids=[5], sampling_params={})
        assert (server.num_running, manager.balancer.num_leases) == (0, 0)

    run_virtual(main())


def test_if_one_engine_does_not_come_up_the_others_are_closed() -> None:
    class Broken(ScriptedServer):
        async def start(self) -> None:
            raise ServerDied("no memory", server=self.name)

    good = ScriptedServer([])

    async def main() -> None:
        with pytest.raises(ServerDied, match="server gpu-7: no memory"):
            await AsyncLLMServerManager([good, Broken([], name="gpu-7")]).start()
        assert not (await good.health()).is_alive

    run_virtual(main())
