"""Loss, gradients and optimiser of the trainer, against a plain computation on the same device and on the CPU.

Tolerances. In float32 the computations differ in the order of sums alone: 1e-5 of the loss, and 5e-5 of the norm of the
gradients, on the same device; four times that against the CPU, whose kernels sum in other orders. In bfloat16, both the
trainer and the plain computation are compared with float32 on the CPU at the same bfloat16 weights: the trainer's error
may be 1.5 times the plain one's. AdamW is compared with torch's own on the CPU, from the trainer's own gradients.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch

from agent_loop.training.actor import Actor
from benchmarks.gpu.models import copy_of, random_model, small_config
from benchmarks.gpu.report import Check, NotRun, StageReport
from benchmarks.gpu.rows import (
    Gradients,
    actor_gradients,
    actor_of,
    adamw_step,
    batch_near,
    plain_gradients,
    random_rows,
    trained_weights,
)

LOSS_TOLERANCE, GRADIENT_TOLERANCE, CPU_FACTOR = 1e-5, 5e-5, 4.0
BFLOAT16_FACTOR = 1.5
STEP_TOLERANCE = {32: 1e-3, 8: 0.05}
"""Largest mean error of two steps of AdamW as a share of their mean length, by the bits of its state."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of an update."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    dtype: torch.dtype = torch.float32


CASES = (
    Case("float32"),
    Case("float32, several micro-batches", {"max_tokens_per_micro_batch": 150}),
    Case("float32, gradient checkpointing", {"gradient_checkpointing": True}),
    Case("float32, selective checkpointing", {"gradient_checkpointing": "selective"}),
    Case("float32, optimiser on the host", {"optimizer_on_host": True}),
    Case("bfloat16", {}, torch.bfloat16),
    Case("bfloat16, selective checkpointing", {"gradient_checkpointing": "selective"}, torch.bfloat16),
    Case("bfloat16, optimiser on the host", {"optimizer_on_host": True}, torch.bfloat16),
    Case("float32, optimiser in 8 bits", {"optimizer_bits": 8}),
)


def run(device: torch.device, report: StageReport) -> None:
    """Run the checks."""
    for case in CASES:
        with report.check(case.name) as check:
            if case.settings.get("optimizer_bits") == 8 and importlib.util.find_spec("bitsandbytes") is None:
                raise NotRun("bitsandbytes is not installed")
            compare(case, device, check)
    with report.check("large vocabulary in several blocks, float32") as check:
        _large_vocabulary(device, check)


def compare(case: Case, device: torch.device, check: Check) -> None:
    """Compare two updates of the trainer with the plain computation."""
    sizes = [(20, 30, 10, 25), (33, 40), (5, 12, 8, 50), (60, 7), (20, 30, 10, 26)]
    model = random_model(small_config(device), device=device)
    rows = random_rows(sizes, vocabulary=model.config.vocab_size)
    actor = actor_of(copy_of(model, device=device, dtype=torch.float32), dtype=case.dtype, **case.settings)
    before, found = trained_weights(actor), list[Gradients]()
    for number in range(2):
        if number == 0:
            rounded = copy_of(model, device=device, dtype=case.dtype)
        else:
            rounded = copy_of(actor.model, device=device, dtype=case.dtype)
        batch, advantages_BR = batch_near(rounded, rows, seed=number)
        found.append(actor_gradients(actor, batch, advantages_BR))
        if number == 0:
            _compare_gradients(check, found[0], rounded, (rows, batch, advantages_BR), actor)
    _compare_steps(check, actor, before, found)


def _compare_gradients(check: Check, ours: Gradients, model: Any, inputs: Any, actor: Actor) -> None:
    rows, batch, advantages_BR = inputs
    options = {"config": actor._config}
    plain = plain_gradients(model, rows, batch, advantages_BR, **options)
    on_cpu = copy_of(model, device=CPU, dtype=torch.float32)
    exact = plain_gradients(on_cpu, rows, batch, advantages_BR, **options)
    if model.dtype == torch.float32:
        check.at_most("loss", abs(ours.loss - plain.loss) / abs(exact.loss), LOSS_TOLERANCE)
        check.at_most("gradients", ours.error(plain), GRADIENT_TOLERANCE)
        check.at_most("gradients to the CPU's", ours.error(exact), CPU_FACTOR * GRADIENT_TOLERANCE)
        return
    check.at_most("gradients", ours.error(exact), BFLOAT16_FACTOR * plain.error(exact))
    check.figure("plain", plain.error(exact))


def _compare_steps(
    check: Check, actor: Actor, before: dict[str, torch.Tensor], found: list[Gradients]
) -> None:
    """Compare the weights after both updates with those of torch's AdamW, and the model's copies with the weights."""
    after, config = trained_weights(actor), actor._config
    expected = adamw_step(before, [each.of_weights for each in found], config=config)
    errors = torch.cat([(after[name] - expected[name]).abs().flatten() for name in before])
    lengths = torch.cat([(expected[name] - before[name]).abs().flatten() for name in before])
    limit = STEP_TOLERANCE[config.optimizer_bits]
    check.at_most("steps", float(errors.mean() / lengths.mean()), limit)
    for name, parameter in actor.model.named_parameters():
        is_copy = torch.equal(parameter.detach().float().cpu(), after[name].to(parameter.dtype).float())
        check.require(is_copy, f"{name} of the model differs from the optimiser's weight")


def _large_vocabulary(device: torch.device, check: Check) -> None:
    """Compare an update whose logits are computed in several blocks of the vocabulary."""
    vocabulary = 40_000 if device.type == "cuda" else 6000
    num_tokens = 4000 if device.type == "cuda" else 400
    config = small_config(device, vocab_size=vocabulary, num_hidden_layers=1, initializer_range=0.05)
    rows = random_rows([(8, num_tokens // 4)] * 4, vocabulary=vocabulary)
    model = random_model(config, device=device)
    batch, advantages_BR = batch_near(model, rows)
    actor = actor_of(copy_of(model, device=device, dtype=torch.float32))
    ours = actor_gradients(actor, batch, advantages_BR)
    plain = plain_gradients(model, rows, batch, advantages_BR, config=actor._config)
    check.at_most("loss", abs(ours.loss - plain.loss) / abs(plain.loss), LOSS_TOLERANCE)
    check.at_most("gradients", ours.error(plain), GRADIENT_TOLERANCE)
