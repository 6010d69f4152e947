"""One offer for all servers of a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.weights import SharedWeights, WeightReceiver, WeightSender, offered
from agent_loop.weights.handle import Transport
from tests.weights.adapting import adapted_of, base_weights
from tests.weights.receiving import blocks, flat

WEIGHTS = {"a": torch.arange(3000.0), "b": torch.arange(7)}


class EngineElsewhere(ScriptedServer):
    """A server that passes weights on to an engine in another process, and reads what the engine would."""

    def __init__(self, name: str, *, transport: Transport = "shared_memory", fails: bool = False) -> None:
        super().__init__([], name=name)
        self.sender = WeightSender(transport)
        self.blocks: list[str] = []
        self.received: dict[str, Tensor] = {}
        self._fails = fails

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> None:
        async with offered(weights, sender=self.sender, weight_version=weight_version) as handle:
            if self._fails:
                raise WeightsError("this engine refuses")
            assert handle.weight_version == weight_version
            with WeightReceiver() as receiver:
                arrived = await asyncio.to_thread(receiver.receive_all, handle.to_json())
            self.received = {name: tensor.clone() for name, tensor in arrived.items()}
            for part in (handle, handle.base):
                if part is not None and part.transport == "shared_memory":
                    self.blocks += [name for name, _ in part.field("blocks", list)]

    async def close(self) -> None:
        self.sender.close()
        await super().close()


class EngineHere(ScriptedServer):
    received: dict[str, Tensor]

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> None:
        self.received = dict(weights)


def pool(*servers: ScriptedServer) -> AsyncLLMServerManager:
    return AsyncLLMServerManager(servers)


def test_servers_of_a_pool_share_one_copy_and_keep_it_from_update_to_update() -> None:
    async def main() -> None:
        servers = [EngineElsewhere(f"engine-{i}") for i in range(3)]
        manager = pool(*servers, ScriptedServer([], name="here"))
        for version in (1, 2):
            await manager.update_weights(iter(WEIGHTS.items()), weight_version=version)
        names = {name for server in servers for name in server.blocks}
        assert len(names) == 1
        assert names <= blocks()
        assert all(torch.equal(server.received["a"], WEIGHTS["a"]) for server in servers)
        await manager.close()
        assert not names & blocks()

    asyncio.run(main())


def test_servers_of_a_pool_share_one_base_and_one_here_gets_merged_weights() -> None:
    async def main() -> None:
        servers, here = [EngineElsewhere(f"engine-{i}") for i in range(2)], EngineHere([], name="here")
        manager, base = pool(*servers, here), base_weights()
        for version in (1, 2):
            weights = adapted_of(base, version=version)
            await manager.update_weights(weights, weight_version=version)
            for server in (*servers, here):
                assert flat(server.received.items()) == flat(weights)
        assert len({name for server in servers for name in server.blocks}) == 2
        await manager.close()

    asyncio.run(main())


@pytest.mark.parametrize("transport", ["broadcast", "disk"])
def test_the_other_transports_serve_a_pool_too(transport: Transport) -> None:
    async def main() -> None:
        servers = [EngineElsewhere(f"engine-{i}", transport=transport) for i in range(2)]
        manager = pool(*servers)
        await manager.update_weights(WEIGHTS.items(), weight_version=1)
        assert all(torch.equal(server.received["b"], WEIGHTS["b"]) for server in servers)
        await manager.close()

    asyncio.run(main())


def test_a_server_that_refuses_ends_the_offer_for_all() -> None:
    async def main() -> None:
        servers = [EngineElsewhere("good"), EngineElsewhere("bad", fails=True)]
        manager = pool(*servers)
        with pytest.raises(WeightsError, match="this engine refuses"):
            await manager.update_weights(WEIGHTS.items(), weight_version=1)
        assert not blocks()
        await manager.close()

    asyncio.run(main())


def test_weights_that_cannot_be_offered_are_refused_once_for_all() -> None:
    async def main() -> None:
        manager = pool(EngineElsewhere("a"), EngineElsewhere("b"))
        with pytest.raises(WeightsError, match="meta device"):
            await manager.update_weights([("w", torch.empty(2, device="meta"))], weight_version=1)
        await manager.close()

    asyncio.run(main())


def test_when_the_server_that_shared_its_sender_is_closed_another_takes_over() -> None:
    async def main() -> None:
        first, second = EngineElsewhere("first"), EngineElsewhere("second")
        senders: dict[Any, WeightSender] = {}
        for server in (first, second):
            async with SharedWeights(WEIGHTS.items(), senders=senders) as shared:
                assert len(shared) == 2
                await server.update_weights(shared, weight_version=1)
            assert list(senders.values()) == [server.sender]
            await server.close()

    asyncio.run(main())


def test_cancelled_while_the_weights_are_copied_the_offer_is_left_again() -> None:
    async def main() -> None:
        entered = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow_weights() -> Iterable[tuple[str, Tensor]]:
            loop.call_soon_threadsafe(entered.set)
            yield from WEIGHTS.items()

        with WeightSender("shared_memory") as sender:

            async def publish() -> None:
                async with offered(slow_weights(), sender=sender, weight_version=1):
                    pytest.fail("nobody waits for this any more")

            task = asyncio.create_task(publish())
            await entered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not blocks()
            async with offered(WEIGHTS.items(), sender=sender, weight_version=2) as handle:
                assert WeightReceiver().receive_all(handle).keys() == WEIGHTS.keys()

    asyncio.run(main())


def test_the_event_loop_goes_on_while_weights_are_offered() -> None:
    async def main() -> None:
        async def publish() -> None:
            async with offered([("large", torch.zeros(30_000_000))], sender=sender, weight_version=1):
                pass

        with WeightSender("shared_memory") as sender:
            turns = 0

            async def count() -> None:
                nonlocal turns
                while not done.is_set():
                    turns += 1
                    await asyncio.sleep(0)

            done = asyncio.Event()

            async def publish_and_stop() -> None:
                await publish()
                done.set()

            await run_together([publish_and_stop(), count()])
            assert turns > 10

    asyncio.run(main())
