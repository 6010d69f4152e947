"""Weights from this process to another on the same GPU, through CUDA IPC, and to an engine in a process of its own.

On a CPU the transport is shared memory, which the package chooses there.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from agent_loop.config import ModelConfig
from agent_loop.servers.base import ServerSpec
from agent_loop.servers.embedded_process import EmbeddedProcess
from agent_loop.types import SamplingParams
from agent_loop.weights.cuda_ipc import BUCKET_BYTES
from agent_loop.weights.handle import Transport
from agent_loop.weights.sender import WeightSender
from benchmarks.gpu.completions import complete, random_prompts
from benchmarks.gpu.devices import GB, allocated_bytes, elapsed_s, free_bytes, synchronize
from benchmarks.gpu.models import (
    USABLE_SHARE,
    config_of,
    copy_of,
    qwen3_sizes,
    random_model,
    small_config,
)
from benchmarks.gpu.receiver import checksums, receiving
from benchmarks.gpu.report import Check, NotRun, StageReport
from benchmarks.gpu.stages.engine import serve

NUM_OFFERS = 5
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def run(device: torch.device, report: StageReport) -> None:
    """Run the checks."""
    transport: Transport = "cuda_ipc" if device.type == "cuda" else "shared_memory"
    with report.check(f"{NUM_OFFERS} offers to another process, {transport}") as check:
        _offers(check, device, transport)
    with report.check("engine in a process of its own") as check:
        asyncio.run(_engine(check, device, transport))
    name = "4B" if device.type == "cuda" else "tiny"
    with report.check(f"{name} in bfloat16, to the engine of this process and to another process") as check:
        _publish(check, device, transport)


def random_weights(device: torch.device, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of several types and sizes. On a GPU they fill several buckets, one of them alone."""
    generator = torch.Generator(device).manual_seed(seed)
    large = 2 * BUCKET_BYTES // 4 if device.type == "cuda" else 100_000

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    return {
        "vector": values(1000),
        "scalar": values(1)[0],
        "large": values(large // 100, 100),
        "bfloat16": values(large // 2).bfloat16(),
        "integers": torch.arange(77, device=device) + seed,
        "not contiguous": values(64, 32).t(),
    }


def _offers(check: Check, device: torch.device, transport: Transport) -> None:
    weights = random_weights(device)
    before = allocated_bytes(device)
    with receiving(device) as receiver, WeightSender(transport) as sender:
        seconds: list[float] = []
        for version in range(NUM_OFFERS):
            if version % 2:  # other values at the same addresses
                weights["vector"].add_(1)
                weights["large"].mul_(-1)
            expected = checksums(weights.items())
            received: list[str] = []

            def send(version: int = version, received: list[str] = received) -> None:
                with sender.offer(weights.items(), weight_version=version) as handle:
                    received.append(receiver.receive(handle.to_json()))

            seconds.append(elapsed_s(device, send))
            check.require(received == [expected], f"offer {version} arrived changed")
        num_bytes = sum(weight.nbytes for weight in weights.values())
        check.figure("fastest offer", num_bytes / min(seconds[1:]) / GB, "GB/s")
        if device.type == "cuda":
            torch.cuda.ipc_collect()
            left = allocated_bytes(device) - before
            check.at_most("left after the last offer", left / GB, 0.01, "GB")


def _publish(check: Check, device: torch.device, transport: Transport) -> None:
    """Measure how long the weights of a model take, in place and through the transport."""
    is_gpu = device.type == "cuda"
    config = config_of(qwen3_sizes("4B")) if is_gpu else small_config(device)
    model = random_model(config, device=device, dtype=torch.bfloat16)
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    if is_gpu and 3 * num_bytes > USABLE_SHARE * free_bytes(device):
        raise NotRun("three copies of the weights do not fit")
    check.figure("weights", num_bytes / GB, "GB")

    async def in_place() -> float:
        server = serve(model, max_slots=1)
        try:
            synchronize(device)
            begun = asyncio.get_running_loop().time()
            await server.update_weights(model.state_dict().items(), weight_version=1)
            synchronize(device)
            return asyncio.get_running_loop().time() - begun
        finally:
            await server.close()

    check.figure("in place", asyncio.run(in_place()), "s")
    with receiving(device) as receiver, WeightSender(transport) as sender:

        def send() -> None:
            with sender.offer(model.state_dict().items(), weight_version=1) as handle:
                receiver.receive(handle.to_json())

        check.figure("to another process, with checksums", elapsed_s(device, send), "s")


async def _engine(check: Check, device: torch.device, transport: Transport) -> None:
    """Send a trainer's weights to an engine process, and compare its completions with those of an engine here."""
    old, new = (random_model(small_config(device), device=device, seed=seed) for seed in (0, 1))
    prompts = random_prompts([12, 40], vocabulary=old.config.vocab_size)
    with TemporaryDirectory() as folder:
        copy_of(old, device=torch.device("cpu"), dtype=old.dtype).save_pretrained(Path(folder))
        model = ModelConfig(path=folder, device=device.type)  # pyright: ignore[reportArgumentType]
        process: Any = EmbeddedProcess(ServerSpec("engine", model, 256, weight_transfer=transport))
        await process.start()
        try:
            for number, source in enumerate((old, new, old, new)):
                await process.update_weights(source.state_dict().items(), weight_version=number)
                here = serve(source)
                try:
                    expected = await complete(here, prompts, PARAMS)
                finally:
                    await here.close()
                found = await complete(process, prompts, PARAMS, session=f"update-{number}")
                for one, other in zip(found, expected, strict=True):
                    check.require(one.tokens == other.tokens, f"other tokens after update {number}")
                    difference = float(np.abs(one.logprobs - other.logprobs).max())
                    check.require(difference < 1e-4, f"log-probs differ by {difference:.3g}")
            check.figure("updates", 4)
        finally:
            await process.close()
