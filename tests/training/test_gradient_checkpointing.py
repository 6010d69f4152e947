"""Gradient checkpointing computes layers again; the selective kind keeps the outputs of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agent_loop.rollout.batch import assemble
from agent_loop.training.forward import response_logprobs
from agent_loop.training.micro_batches import micro_batches
from agent_loop.training.policy import make_exact
from tests.training.fakes import PAD, sample_trajectories, tiny_policy

NUM_LAYERS = 2


class CountedOperations(TorchDispatchMode):
    """Numbers of forward operations of attention and of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attentions = self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.num_attentions += "attention" in name and "backward" not in name
        self.num_products += name == "aten::mm"
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_computes_attention_once_and_changes_no_gradient() -> None:
    batch = assemble(sample_trajectories(tiny_policy()), pad_token_id=PAD)
    [part] = micro_batches(
        batch, rows=torch.arange(len(batch)), max_tokens=10_000, device=torch.device("cpu")
    )

    def computed(kind: Any) -> tuple[CountedOperations, list[Tensor]]:
        model = tiny_policy()
        make_exact(model, gradient_checkpointing=kind)
        with CountedOperations() as counted:
            found = response_logprobs(model, part, temperature=0.8)
            gradients = torch.autograd.grad(found.sampled_BR.sum(), list(model.parameters()))
        return counted, list(gradients)

    none, full, selective = (computed(kind) for kind in (False, True, "selective"))

    num_attentions = none[0].num_attentions
    assert full[0].num_attentions - num_attentions == NUM_LAYERS
    assert selective[0].num_attentions == num_attentions
    assert none[0].num_products < selective[0].num_products == full[0].num_products
    for gradients in (full[1], selective[1]):
        for found, expected in zip(gradients, none[1], strict=True):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
