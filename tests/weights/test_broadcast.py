"""Tests of failures of the broadcast. The receivers are threads here, each with its own process group."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.weights import broadcast
from agent_loop.weights.broadcast import serve_store
from agent_loop.weights.receiver import WeightReceiver
from agent_loop.weights.sender import WeightSender
from tests.listeners import is_loopback, listening_addresses

WEIGHTS = {str(i): torch.full((1000,), float(i)) for i in range(6)}

InThread = Callable[..., "Future[Iterable[tuple[str, Tensor]]]"]


@pytest.fixture
def in_thread() -> Iterator[InThread]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "GLOO_BUCKET_BYTES", 8500)  # two of the tensors


def test_the_default_process_group_is_not_changed_or_created(in_thread: InThread) -> None:
    def update(sender: WeightSender, receiver: WeightReceiver) -> None:
        with sender.offer(WEIGHTS.items(), weight_version=0) as handle:
            received = dict(in_thread(receiver.receive, handle.to_json()).result(30))
            assert all(torch.equal(received[name], tensor) for name, tensor in WEIGHTS.items())

    with WeightSender("broadcast", timeout_s=30) as sender, WeightReceiver() as receiver:
        update(sender, receiver)
        assert not dist.is_initialized()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            update(sender, receiver)
            ones = torch.ones(2)
            dist.all_reduce(ones)
            assert ones.tolist() == [1, 1]
        finally:
            dist.destroy_process_group()


def test_the_store_of_a_local_broadcast_listens_on_loopback_only() -> None:
    before = Counter(listening_addresses([os.getpid()]))
    store = serve_store("127.0.0.1")
    new = Counter(listening_addresses([os.getpid()])) - before
    assert len(new) == 1
    assert all(map(is_loopback, new))
    del store


def test_a_receiver_that_does_not_join_is_named_after_the_time_limit() -> None:
    with (
        WeightSender("broadcast", num_receivers=2, timeout_s=0.2) as sender,
        pytest.raises(
            WeightsError, match=r"of 2 receivers of a broadcast, \[0, 1\] did not join within 0.2 s"
        ),
        sender.offer(WEIGHTS.items(), weight_version=0),
    ):
        pass


def test_an_error_of_the_caller_is_raised_and_aborts_waiting_receivers(in_thread: InThread) -> None:
    with WeightSender("broadcast", num_receivers=2, timeout_s=30) as sender, WeightReceiver(1) as receiver:
        with (
            pytest.raises(RuntimeError, match="the control channel broke"),
            sender.offer(WEIGHTS.items(), weight_version=0) as handle,
        ):
            waiting = in_thread(receiver.receive, handle)
            raise RuntimeError("the control channel broke")
        with pytest.raises(WeightsError, match="aborted this offer"):
            waiting.result(10)


def test_a_sender_that_has_ended_raises_an_error_in_the_receiver(in_thread: InThread) -> None:
    with WeightSender("broadcast", timeout_s=2) as sender, WeightReceiver() as receiver:
        with sender.offer(WEIGHTS.items(), weight_version=0) as handle:
            in_thread(receiver.receive, handle).result(30)
        sender.close()
        with pytest.raises(WeightsError, match="no sender of weights answers"):
            receiver.receive(handle)
