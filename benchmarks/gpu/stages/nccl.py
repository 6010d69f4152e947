"""The trainer's process group with one rank: FSDP over NCCL, its weights, and the broadcast of weights.

NCCL does not let two ranks share a GPU. With one GPU the broadcast has one rank, which proves that the group is made
and that buckets pass through it; with two, a process on the other GPU receives it. On a CPU the backend is gloo.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from agent_loop.training.process_group import (
    LOOPBACK,
    ProcessGroup,
    join_process_group,
    leave_process_group,
    open_store,
)
from agent_loop.weights.sender import WeightSender
from benchmarks.gpu.devices import GB, elapsed_s
from benchmarks.gpu.models import copy_of, random_model, small_config
from benchmarks.gpu.receiver import checksums, receiving
from benchmarks.gpu.report import Check, NotRun, StageReport
from benchmarks.gpu.rows import actor_gradients, actor_of, batch_near, random_rows
from benchmarks.gpu.stages.cuda_ipc import random_weights

TOLERANCE = 5e-5
BFLOAT16_TOLERANCE = 0.05
TIMEOUT_S = 60.0
CASES: tuple[tuple[str, torch.dtype, dict[str, Any]], ...] = (
    ("float32", torch.float32, {"share_prefixes": False}),
    (
        "float32, gradient checkpointing",
        torch.float32,
        {"share_prefixes": False, "gradient_checkpointing": True},
    ),
    ("float32, prefix trees", torch.float32, {}),
    ("bfloat16", torch.bfloat16, {"share_prefixes": False}),
)


def run(device: torch.device, report: StageReport) -> None:
    """Run the checks."""
    if device.type == "cuda":
        torch.cuda.set_device(0)
    with _one_rank(device) as process_group:
        for name, dtype, settings in CASES:
            with report.check(f"FSDP with one rank, {name}") as check:
                _compare(check, device, process_group, dtype=dtype, settings=settings)
        with report.check("collective calls") as check:
            _collectives(check, device, process_group)
    with report.check("broadcast of weights, 1 rank") as check:
        _broadcast_alone(check, device)
    with report.check("broadcast of weights, 2 ranks") as check:
        if device.type == "cuda" and torch.cuda.device_count() < 2:
            raise NotRun("NCCL needs a second GPU")
        _broadcast(check, device)


@contextmanager
def _one_rank(device: torch.device) -> Generator[ProcessGroup]:
    store = open_store(1, host=LOOPBACK)
    yield join_process_group(device, store=store, rank=0, world_size=1)
    leave_process_group()


def _compare(
    check: Check,
    device: torch.device,
    process_group: ProcessGroup,
    *,
    dtype: torch.dtype,
    settings: dict[str, Any],
) -> None:
    """Compare an update of a sharded model with that of a model of one process, and the published weights."""
    model = random_model(small_config(device), device=device)
    rows = random_rows([(20, 30, 10, 25), (33, 40), (60, 7)], vocabulary=model.config.vocab_size)
    batch, advantages_BR = batch_near(copy_of(model, device=device, dtype=dtype), rows)
    alone = actor_of(copy_of(model, device=device, dtype=torch.float32), dtype=dtype, **settings)
    # A process group loads the model on the CPU, and sharding moves it to the device.
    on_cpu = copy_of(model, device=torch.device("cpu"), dtype=torch.float32)
    sharded = actor_of(on_cpu, dtype=dtype, process_group=process_group, **settings)
    check.require(sharded.model.device.type == device.type, f"the shards are on {sharded.model.device}")
    expected = actor_gradients(alone, batch, advantages_BR)
    found = actor_gradients(sharded, batch, advantages_BR)
    tolerance = TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
    check.at_most("loss", abs(found.loss - expected.loss) / abs(expected.loss), tolerance)
    check.at_most("gradients", found.error(expected), tolerance)
    published, of_one = dict(sharded.weights()), dict(alone.weights())
    check.require(published.keys() == of_one.keys(), "the weights have other names")
    length = max(
        float((of_one[name] - before).abs().max()) for name, before in _weights(model, dtype).items()
    )
    differences = [float((published[name].float() - of_one[name].float()).abs().mean()) for name in of_one]
    check.at_most("weights after the step", max(differences) / length, 0.05)


def _weights(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}


def _collectives(check: Check, device: torch.device, process_group: ProcessGroup) -> None:
    """Sum tensors and gather objects, on the device and on the CPU."""
    values = torch.arange(5.0, device=device)
    torch.distributed.all_reduce(values)
    check.require(
        values.tolist() == [0, 1, 2, 3, 4], "all_reduce on the device changed the values of one rank"
    )
    on_cpu = torch.ones(3)
    torch.distributed.all_reduce(on_cpu)
    gathered: list[Any] = [None]
    torch.distributed.all_gather_object(gathered, {"a": 1})
    check.require(on_cpu.tolist() == [1, 1, 1], "all_reduce on the CPU changed the values of one rank")
    check.require(gathered == [{"a": 1}], "all_gather_object returned something else")
    check.require(process_group.size == 1 and process_group.mesh is not None, "the group has no mesh")


def _broadcast_alone(check: Check, device: torch.device) -> None:
    """Broadcast weights in a group of the sender alone."""
    weights = random_weights(device)
    with WeightSender("broadcast", num_receivers=0, timeout_s=TIMEOUT_S) as sender:
        for version in range(2):
            with sender.offer(weights.items(), weight_version=version):
                pass
    check.figure("sent", 2 * sum(weight.nbytes for weight in weights.values()) / GB, "GB")


def _broadcast(check: Check, device: torch.device) -> None:
    """Broadcast weights from this process to another, on a device of its own."""
    weights = random_weights(device)
    expected = checksums(weights.items())
    other = torch.device("cuda", 1) if device.type == "cuda" else device
    with WeightSender("broadcast", timeout_s=TIMEOUT_S) as sender, receiving(other) as receiver:

        def send(version: int) -> None:
            with sender.offer(weights.items(), weight_version=version) as handle:
                check.require(receiver.receive(handle.to_json()) == expected, "the weights arrived changed")

        seconds = [elapsed_s(device, lambda version=version: send(version)) for version in range(3)]
    num_bytes = sum(weight.nbytes for weight in weights.values())
    check.figure("fastest", num_bytes / min(seconds) / GB, "GB/s")
