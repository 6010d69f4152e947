"""A vLLM server that the package starts, against `transformers`, with a small random model: the log-probs of what it
sampled, and new weights."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from agent_loop.config import ModelConfig
from agent_loop.servers.base import ServerSpec
from agent_loop.types import SamplingParams
from benchmarks.gpu.completions import complete, logprobs_of, plain_logprobs, random_prompts
from benchmarks.gpu.models import copy_of, random_model, small_config
from benchmarks.gpu.report import Check, NotRun, StageReport
from benchmarks.gpu.verdicts import NO_VLLM

TOLERANCE = 1e-2
"""Largest difference of log-probs in float32. On a GPU, kernels of vLLM multiply in TF32."""
PARAMS = SamplingParams(temperature=1, max_tokens=32, ignore_eos=True)
ON_CPU = {"enforce_eager": "true", "kv_cache_memory_bytes": 64 * 2**20, "block_size": 32}


def run(device: torch.device, report: StageReport) -> None:
    """Run the check."""
    with report.check("log-probs before and after new weights") as check:
        if importlib.util.find_spec("vllm") is None:
            raise NotRun(NO_VLLM)
        with TemporaryDirectory() as folder:
            asyncio.run(_compare(check, device, Path(folder)))


async def _compare(check: Check, device: torch.device, folder: Path) -> None:
    from agent_loop.servers.vllm import VLLMServer

    # vLLM for CPUs has attention for heads of at least 32 dimensions.
    old, new = (random_model(small_config(device, head_dim=64), device=device, seed=seed) for seed in (0, 1))
    copy_of(old, device=torch.device("cpu"), dtype=old.dtype).save_pretrained(folder)
    model = ModelConfig(path=str(folder), device=device.type)  # pyright: ignore[reportArgumentType]
    kwargs: dict[str, Any] = ON_CPU if device.type == "cpu" else {"gpu_memory_utilization": 0.3}
    server: Any = VLLMServer(ServerSpec("vllm", model, 512, engine_kwargs=kwargs))
    prompts = random_prompts([9, 40, 120], vocabulary=old.config.vocab_size)
    await server.start()
    try:
        for version, reference in enumerate((old, new)):
            if version:
                await server.update_weights(new.state_dict().items(), weight_version=version)
            for each in await complete(server, prompts, PARAMS, session=f"run-{version}"):
                expected = logprobs_of(
                    plain_logprobs(reference, each.text, start=len(each.prompt)), each.tokens
                )
                difference = float((each.logprobs - expected).abs().max())
                check.at_most(f"version {version}", difference, TOLERANCE)
    finally:
        await server.close()
