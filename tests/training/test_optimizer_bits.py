"""AdamW with a state of 8 bits follows AdamW with 32, and its state is a quarter as large."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from agent_loop.config import ActorConfig
from agent_loop.training.master_weights import MasterWeights
from agent_loop.training.optimizer import Optimizer

SIZE = 8192


def trained(bits: int) -> tuple[Optimizer, Tensor]:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(SIZE))
    optimizer = Optimizer(
        MasterWeights({"weight": weight}, {}), config=ActorConfig(lr=1e-2, optimizer_bits=bits), seed=0
    )
    take_steps(optimizer, weight, num_steps=20)
    return optimizer, weight


def take_steps(optimizer: Optimizer, weight: Tensor, *, num_steps: int) -> None:
    """Take steps towards 0."""
    for _ in range(num_steps):
        optimizer.start_update()
        weight.grad = weight.detach() / SIZE
        optimizer.step(loss=1.0)
        optimizer.end_update()


def num_bytes(optimizer: Optimizer) -> int:
    state = optimizer.state_dict()["adamw"]["weight"]
    return sum(value.numel() * value.itemsize for value in state.values() if isinstance(value, Tensor))


def test_a_state_of_8_bits_follows_one_of_32() -> None:
    pytest.importorskip("bitsandbytes")
    (exact, expected), (quantised, found) = trained(32), trained(8)

    torch.manual_seed(0)
    moved_by = (expected.detach() - torch.randn(SIZE)).abs().mean()
    assert float((found - expected).detach().abs().mean()) < 0.05 * float(moved_by)
    assert num_bytes(quantised) < 0.3 * num_bytes(exact)


@pytest.mark.parametrize("bits", [8, 32])
def test_training_resumes_exactly_from_a_saved_state(bits: int) -> None:
    if bits == 8:
        pytest.importorskip("bitsandbytes")
    first, weight = trained(bits)
    other_weight = torch.nn.Parameter(weight.detach().clone())
    second = Optimizer(
        MasterWeights({"weight": other_weight}, {}), config=ActorConfig(lr=1e-2, optimizer_bits=bits), seed=1
    )

    second.load_state_dict(copy.deepcopy(first.state_dict()))
    take_steps(first, weight, num_steps=3)
    take_steps(second, other_weight, num_steps=3)

    assert torch.equal(weight, other_weight)
