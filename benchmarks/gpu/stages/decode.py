"""Tokens per second of the embedded engine, and how far that is from what the device allows.

A step of a small batch reads all weights once, so that memory bandwidth bounds it; a large batch is bounded by
arithmetic. Both shares are printed, and the rate of `generate` of `transformers` for the smallest and the largest
batch. There is no target.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.types import SamplingParams
from benchmarks.gpu.completions import complete, random_prompts
from benchmarks.gpu.devices import elapsed_s, free_bytes, peak_bandwidth, peak_flops
from benchmarks.gpu.models import (
    USABLE_SHARE,
    config_of,
    flops_per_token,
    qwen3_sizes,
    random_model,
    small_model_sizes,
)
from benchmarks.gpu.report import Check, NotRun, StageReport

BATCHES = (1, 16, 64, 256)
SIZES = ("0.6B", "4B")
BFLOAT16_BYTES = 2
SHORT = 8
"""Tokens of the completions whose time is subtracted, so that the prompts do not count."""


def run(device: torch.device, report: StageReport) -> None:
    """Run the checks."""
    is_gpu = device.type == "cuda"
    if is_gpu and (peak_flops(device) is None or peak_bandwidth(device) is None):
        name = torch.cuda.get_device_name(device)
        print(f"decode: the peak of {name!r} is not known, so that no share is printed", flush=True)
    for name in SIZES if is_gpu else ("tiny",):
        sizes = qwen3_sizes(name) if is_gpu else small_model_sizes(device)
        batches = BATCHES if is_gpu else BATCHES[:2]
        for batch in batches:
            with report.check(f"{name}, bfloat16, batch {batch}") as check:
                is_end = batch in (batches[0], batches[-1])
                _decode(check, device, sizes, batch=batch, compares=is_end)


def _decode(check: Check, device: torch.device, sizes: dict[str, Any], *, batch: int, compares: bool) -> None:
    """Measure the decoding of a batch."""
    is_gpu = device.type == "cuda"
    prompt, num_tokens = (256, 256) if is_gpu else (16, 24)
    context = prompt + num_tokens
    config = config_of(sizes)
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * BFLOAT16_BYTES
    on_meta = random_model(config, device=torch.device("meta"))
    weight_bytes = BFLOAT16_BYTES * sum(weight.numel() for weight in on_meta.parameters())
    if is_gpu and weight_bytes + per_token * context * batch > USABLE_SHARE * free_bytes(device):
        raise NotRun("the weights and the cache do not fit")
    model = random_model(config, device=device, dtype=torch.bfloat16)
    prompts = random_prompts([prompt] * batch, vocabulary=config.vocab_size)

    async def measure() -> float:
        options = {"max_slots": batch, "max_model_len": context}
        server = EmbeddedServer(model, config=EmbeddedConfig(device=device.type, **options))
        try:
            seconds: dict[int, float] = {}
            for number, length in enumerate((SHORT, SHORT, num_tokens)):  # the first one is the warm-up
                params = SamplingParams(temperature=1, max_tokens=length, ignore_eos=True, seed=number)
                begun = asyncio.get_running_loop().time()
                await complete(server, prompts, params, session=f"run-{number}")
                seconds[length] = asyncio.get_running_loop().time() - begun
            return batch * (num_tokens - SHORT) / (seconds[num_tokens] - seconds[SHORT])
        finally:
            await server.close()

    rate = asyncio.run(measure())
    check.require(rate > 0, "the measured time is not positive")
    check.figure("decoded", rate, "tokens/s")
    mean_context = prompt + num_tokens / 2
    bandwidth, peak = peak_bandwidth(device), peak_flops(device)
    if bandwidth is not None:
        read = rate / batch * (weight_bytes + batch * per_token * mean_context)
        check.figure("of the bandwidth", 100 * read / bandwidth, "%")
    if peak is not None:
        flops = rate * flops_per_token(model, context=mean_context)
        check.figure("of the arithmetic", 100 * flops / peak, "%")
    if compares:
        check.figure("engine / generate", rate / _rate_of_generate(model, prompts, num_tokens=num_tokens))


@torch.no_grad()
def _rate_of_generate(model: Any, prompts: list[list[int]], *, num_tokens: int) -> float:
    """Return the tokens per second of `generate`, measured in the same way."""
    ids = torch.tensor(prompts, device=model.device)

    def seconds(length: int) -> float:
        options = {"min_new_tokens": length, "max_new_tokens": length, "do_sample": True}
        return elapsed_s(
            model.device, lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        )

    seconds(SHORT)  # the warm-up
    return len(prompts) * (num_tokens - SHORT) / (seconds(num_tokens) - seconds(SHORT))
