"""Tests of the transport through GPU memory. The round trip needs a GPU, the other tests do not."""

from __future__ import annotations

import pytest
import torch

from agent_loop.errors import WeightsError
from agent_loop.weights.handle import WeightHandle
from agent_loop.weights.receiver import WeightReceiver
from agent_loop.weights.sender import WeightSender
from tests.weights.receiving import Receiver, flat


def test_weights_on_the_cpu_are_rejected() -> None:
    with (
        WeightSender("cuda_ipc") as sender,
        pytest.raises(WeightsError, match=r"weight 'w' is on cpu.*shared_memory"),
        sender.offer([("w", torch.ones(3))], weight_version=0),
    ):
        pass


def test_a_rank_outside_of_the_offer_is_rejected() -> None:
    handle = WeightHandle("cuda_ipc", 0, (), {"gpu": "", "exports": [[]]})
    assert WeightReceiver(0).receive(handle) == []
    with pytest.raises(WeightsError, match="for 1 receivers, but this one has rank 1"):
        WeightReceiver(1).receive(handle)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_other_processes_receive_tensors_on_a_gpu(receivers: list[Receiver]) -> None:
    weights = {"a": torch.randn(1000, 30).bfloat16(), "b": torch.arange(5)}
    on_gpu = {name: tensor.cuda() for name, tensor in weights.items()}
    with WeightSender("cuda_ipc", num_receivers=2) as sender:
        for version in range(3):
            with sender.offer(on_gpu.items(), weight_version=version) as handle:
                for receiver in receivers:
                    assert receiver.receive(handle.to_json()) == flat(weights.items())
