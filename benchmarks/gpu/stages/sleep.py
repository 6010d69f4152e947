"""Sleep and wake of the embedded server: its memory is given back and taken again, and its weights do not change.

On a CPU the weights stay where they are, so that only the cache is given back.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import numpy as np
import torch

from agent_loop.errors import ServerError
from agent_loop.servers.embedded import EmbeddedServer
from agent_loop.types import SamplingParams
from benchmarks.gpu.completions import complete, random_prompts
from benchmarks.gpu.devices import GB, allocated_bytes
from benchmarks.gpu.models import config_of, qwen3_sizes, random_model, small_config
from benchmarks.gpu.report import Check, StageReport
from benchmarks.gpu.stages.engine import serve

LEFT_ASLEEP = 0.2 * GB
"""Largest memory that may stay on the device during sleep: workspaces of the libraries."""
RESERVED_ASLEEP = 0.5 * GB
"""Largest memory that the process may keep from others during sleep, with the unused parts of its blocks."""
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
NUM_ROUNDS = {"cuda": 20, "cpu": 3}


def run(device: torch.device, report: StageReport) -> None:
    """Run the checks."""
    for dtype in (torch.float32, torch.bfloat16):
        with report.check(f"{NUM_ROUNDS[device.type]} rounds, {str(dtype).removeprefix('torch.')}") as check:
            asyncio.run(_rounds(check, device, dtype=dtype))
    with report.check("new weights while asleep") as check:
        asyncio.run(_update_asleep(check, device))


async def _rounds(check: Check, device: torch.device, *, dtype: torch.dtype) -> None:
    """Compare memory, weights and completions before and after each sleep."""
    is_gpu = device.type == "cuda"
    before_model = _memory(device)
    config = config_of(qwen3_sizes("0.6B")) if is_gpu else small_config(device)
    server = serve(random_model(config, device=device, dtype=dtype), max_slots=16)
    prompts = random_prompts([9, 40, 120], vocabulary=config.vocab_size)
    try:
        expected = await complete(server, prompts, PARAMS)
        weights = _weights_of(server)
        awake = _memory(device) - before_model
        cache = server.cache_bytes
        for number in range(NUM_ROUNDS[device.type]):
            await server.sleep()
            asleep = _memory(device) - before_model
            check.require(server.cache_bytes == 0, "the cache is still allocated during sleep")
            if is_gpu:
                reserved = float(torch.cuda.memory_reserved(device))
                check.require(
                    asleep <= LEFT_ASLEEP and reserved <= before_model + RESERVED_ASLEEP,
                    f"{asleep / GB:.2f} of {awake / GB:.2f} GB are still allocated during sleep, and "
                    f"{reserved / GB:.2f} GB reserved",
                )
            await _expect_error(check, server)
            await server.wake_up()
            check.require(server.cache_bytes == cache, "the cache has another size after wake_up")
            for name, weight in _weights_of(server).items():
                check.require(torch.equal(weight, weights[name]), f"{name} changed in round {number}")
            again = await complete(server, prompts, PARAMS, session=f"round-{number}")
            is_same = all(
                one.tokens == other.tokens and torch.allclose(one.logprobs, other.logprobs, atol=1e-5)
                for one, other in zip(again, expected, strict=True)
            )
            check.require(is_same, f"the completions differ after round {number}")
        if is_gpu:
            back = _memory(device) - before_model
            check.figure("awake", awake / GB, "GB")
            check.figure("asleep", asleep / GB, "GB")
            check.within("awake again / awake", back / awake, 0.98, 1.02)
        check.figure("cache", cache / GB, "GB")
    finally:
        await server.close()


async def _expect_error(check: Check, server: EmbeddedServer) -> None:
    """Check that a server refuses requests during sleep."""
    try:
        await server.generate(np.asarray([1, 2, 3], dtype=np.int32), PARAMS, "asleep")
    except ServerError:
        return
    check.require(False, "the server answered during sleep")


async def _update_asleep(check: Check, device: torch.device) -> None:
    """Update the weights of a server that sleeps, as a trainer on the same device does, and compare completions."""
    old, new = (random_model(small_config(device), device=device, seed=seed) for seed in (0, 1))
    [prompt] = random_prompts([30], vocabulary=old.config.vocab_size)
    server, fresh = serve(old), serve(new)
    try:
        await server.sleep()
        await server.update_weights(new.state_dict().items(), weight_version=1)
        await server.wake_up()
        [found], [expected] = (
            await complete(server, [prompt], PARAMS),
            await complete(fresh, [prompt], PARAMS),
        )
    finally:
        await server.close()
        await fresh.close()
    check.require(found.tokens == expected.tokens, "the completion is not that of the new weights")
    check.at_most("log-probs", float((found.logprobs - expected.logprobs).abs().max()), 1e-5)


def _memory(device: torch.device) -> float:
    gc.collect()
    return allocated_bytes(device)


def _weights_of(server: EmbeddedServer) -> dict[str, torch.Tensor]:
    """Return copies of the weights on the CPU."""
    state: Callable[[], dict[str, torch.Tensor]] = server._engine._runner.model.state_dict
    return {name: weight.detach().cpu().clone() for name, weight in state().items()}
