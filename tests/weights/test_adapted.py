"""Weights with adapters, whose base is sent once, and offers that the servers of a pool share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.weights import adapted
from agent_loop.weights.adapted import AdaptedWeights, Factors
from agent_loop.weights.handle import Transport, WeightHandle
from agent_loop.weights.receiver import WeightReceiver
from agent_loop.weights.sender import WeightSender
from agent_loop.weights.shared import SharedWeights, offered
from tests.weights.receiving import ADAPTED, Receiver, adapted_of, base_weights, block_names, blocks, flat

SHARED_OFFERS: tuple[Transport, ...] = ("shared_memory", "disk")
"""Transports whose offers any receiver can read while they are open."""


def num_bytes(handle: WeightHandle) -> int:
    return sum(spec.num_bytes for spec in handle.tensors)


@pytest.mark.parametrize("transport", SHARED_OFFERS)
def test_updates_are_small_and_both_sides_agree(transport: Transport, receivers: list[Receiver]) -> None:
    base = base_weights()
    bases = set[str]()
    with WeightSender(transport) as sender:
        for version in range(1, 4):
            weights = adapted_of(base, version=version)
            with sender.offer(weights, weight_version=version) as handle:
                assert handle.base is not None
                assert num_bytes(handle) * 20 < num_bytes(handle.base)
                bases.add(handle.base.to_json())
                for receiver in receivers:
                    receiver.start("receive", handle.to_json())
                assert [receiver.reply() for receiver in receivers] == [flat(weights)] * 2
    assert len(bases) == 1


def test_merging_adds_the_product_in_float32_for_any_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_weights()
    weights = adapted_of(base, version=1)
    whole = dict(weights)
    for name, (left_OR, right_RI) in weights.factors.items():
        expected = (base[name].float() + left_OR @ right_RI).bfloat16()
        torch.testing.assert_close(whole[name], expected, atol=1e-5, rtol=2**-7)
        assert not torch.equal(whole[name], base[name])
    assert whole["norm"] is base["norm"]
    assert list(whole) == list(base)
    assert len(weights) == len(base)
    monkeypatch.setattr(adapted, "MERGE_BLOCK_ELEMENTS", 3 * 512)
    for name, merged in weights:
        torch.testing.assert_close(merged, whole[name], atol=1e-5, rtol=2**-7)


@pytest.mark.parametrize("transport", SHARED_OFFERS)
def test_a_new_receiver_reads_the_base_and_an_earlier_one_reads_it_once(transport: Transport) -> None:
    base = base_weights()
    with WeightSender(transport) as sender, WeightReceiver() as constant:
        for version in range(1, 5):
            with sender.offer(adapted_of(base, version=version), weight_version=version) as handle:
                constant.receive(handle.to_json())
        fifth = adapted_of(base, version=5)
        with sender.offer(fifth, weight_version=5) as handle:
            assert flat(WeightReceiver().receive(handle.to_json())) == flat(fifth)
            assert handle.base is not None
            blocks_gone = [["agent-loop-weights-gone", 10]]
            unread = {"blocks": blocks_gone, "folder": "/nowhere", "files": ["x"], "aliases": {}}
            without = WeightHandle(transport, 1, handle.base.tensors, unread)
            without_base = WeightHandle(
                transport, 5, handle.tensors, handle.source, base=without, base_id=handle.base_id
            )
            assert flat(constant.receive(without_base)) == flat(fifth)
            with pytest.raises(WeightsError):
                WeightReceiver().receive(without_base)


def test_a_new_base_replaces_the_old_one_and_frees_its_memory() -> None:
    first, second = base_weights(0), base_weights(1)
    with WeightSender("shared_memory") as sender, WeightReceiver() as receiver:
        with sender.offer(adapted_of(first, version=1), weight_version=1) as handle:
            receiver.receive(handle)
            assert handle.base is not None
            former = set(block_names(handle.base))
        assert former < blocks()
        weights = adapted_of(second, version=2, base_id="second")
        with sender.offer(weights, weight_version=2) as handle:
            assert not former & blocks()
            assert flat(receiver.receive(handle)) == flat(weights)


def test_broadcasts_and_checkpoints_have_merged_weights(tmp_path: Path, receivers: list[Receiver]) -> None:
    weights = adapted_of(base_weights(), version=1)
    with WeightSender("broadcast", timeout_s=30) as sender, sender.offer(weights, weight_version=1) as handle:
        assert handle.base is None
        assert receivers[0].receive(handle.to_json()) == flat(weights)
    (tmp_path / "config.json").write_text("{}")
    save_file(base_weights(), tmp_path / "model.safetensors")
    with WeightSender("disk", like=tmp_path) as sender, sender.offer(weights, weight_version=1) as handle:
        assert handle.base is None
        assert flat(WeightReceiver().receive(handle)) == flat(weights)


def test_factors_that_do_not_fit_are_rejected_with_their_name() -> None:
    base = base_weights()
    left, right = torch.zeros(512, 4), torch.zeros(4, 512)
    for name, factors, message in (
        ("head", Factors(left, right), "'head' adds .* has no such weight"),
        ("norm", Factors(left, right), r"'norm' adds .* has \(512,\) there"),
        (ADAPTED[1], Factors(left, right), r"has \(700, 512\) there"),
        (ADAPTED[0], Factors(left, right[:3]), r"adds \(512, 4\) times \(3, 512\)"),
    ):
        with pytest.raises(WeightsError, match=message):
            AdaptedWeights(base, base_id="first", factors={name: factors})


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
