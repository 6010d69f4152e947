"""Tests that the servers of a pool share one offer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.weights.handle import Transport
from agent_loop.weights.receiver import WeightReceiver
from agent_loop.weights.sender import WeightSender
from agent_loop.weights.shared import SharedWeights, offered
from tests.weights.receiving import adapted_of, base_weights, blocks, flat

WEIGHTS = {"a": torch.arange(3000.0), "b": torch.arange(7)}


class RemoteEngineServer(ScriptedServer):
    """Server that offers weights as for an engine in another process, and receives them as the engine would."""

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
                tensors = await asyncio.to_thread(receiver.receive, handle.to_json())
            self.received = {name: tensor.clone() for name, tensor in tensors}
            for part in (handle, handle.base):
                if part is not None and part.transport == "shared_memory":
                    self.blocks += [name for name, _ in part.source["blocks"]]

    async def close(self) -> None:
        self.sender.close()
        await super().close()


class LocalEngineServer(ScriptedServer):
    received: dict[str, Tensor]

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> None:
        self.received = dict(weights)


def pool(*servers: ScriptedServer) -> Any:
    return AsyncLLMServerManager(servers).pool


async def test_servers_of_a_pool_share_one_copy_and_reuse_it_across_updates() -> None:
    servers = [RemoteEngineServer(f"engine-{i}") for i in range(3)]
    shared = pool(*servers, ScriptedServer([], name="here"))
    for version in (1, 2):
        await shared.update_weights(iter(WEIGHTS.items()), weight_version=version)
    names = {name for server in servers for name in server.blocks}
    assert len(names) == 1
    assert names <= blocks()
    assert all(torch.equal(server.received["a"], WEIGHTS["a"]) for server in servers)
    await shared.close()
    assert not names & blocks()


async def test_servers_of_a_pool_share_one_base_and_a_local_server_gets_merged_weights() -> None:
    servers = [RemoteEngineServer(f"engine-{i}") for i in range(2)]
    here = LocalEngineServer([], name="here")
    shared, base = pool(*servers, here), base_weights()
    for version in (1, 2):
        weights = adapted_of(base, version=version)
        await shared.update_weights(weights, weight_version=version)
        for server in (*servers, here):
            assert flat(server.received.items()) == flat(weights)
    assert len({name for server in servers for name in server.blocks}) == 2
    await shared.close()


async def test_a_server_that_rejects_weights_ends_the_offer_for_all() -> None:
    servers = [RemoteEngineServer("good"), RemoteEngineServer("bad", fails=True)]
    shared = pool(*servers)
    with pytest.raises(WeightsError, match="this engine refuses"):
        await shared.update_weights(WEIGHTS.items(), weight_version=1)
    assert not blocks()
    await shared.close()


async def test_another_sender_is_shared_after_the_first_servers_sender_is_closed() -> None:
    first, second = RemoteEngineServer("first"), RemoteEngineServer("second")
    senders: dict[Any, WeightSender] = {}
    for server in (first, second):
        async with SharedWeights(WEIGHTS.items(), senders=senders) as shared:
            assert len(shared) == 2
            await server.update_weights(shared, weight_version=1)
        assert list(senders.values()) == [server.sender]
        await server.close()


async def test_a_cancellation_while_the_weights_are_copied_closes_the_offer() -> None:
    entered = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow_weights() -> Iterable[tuple[str, Tensor]]:
        loop.call_soon_threadsafe(entered.set)
        yield from WEIGHTS.items()

    with WeightSender("shared_memory") as sender:

        async def publish() -> None:
            async with offered(slow_weights(), sender=sender, weight_version=1):
                pytest.fail("the caller was cancelled")

        task = asyncio.create_task(publish())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not blocks()
        async with offered(WEIGHTS.items(), sender=sender, weight_version=2) as handle:
            assert dict(WeightReceiver().receive(handle)).keys() == WEIGHTS.keys()
