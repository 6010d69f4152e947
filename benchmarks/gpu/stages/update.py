"""Tokens per second of the trainer, its share of the device's peak arithmetic, and its memory against the plan.

The arithmetic is that of the model: 2 operations per weight and token in a forward pass and 6 in training, without the
embedding, and that of attention over half of each row. Adapters need 4: their base has no gradient. Computing
activations again is not counted. There is no target for the share.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from agent_loop.config import Config
from agent_loop.training.actor import Actor
from agent_loop.training.adapters import add_adapters
from benchmarks.gpu.devices import PeakMemory, elapsed_s, free_bytes, peak_flops
from benchmarks.gpu.models import (
    USABLE_SHARE,
    config_of,
    flops_per_token,
    qwen3_sizes,
    random_model,
    small_model_sizes,
)
from benchmarks.gpu.report import Check, NotRun, StageReport
from benchmarks.gpu.rows import as_batch, random_rows
from benchmarks.gpu.stages.decode import SIZES
from benchmarks.gpu.stages.memory import TOLERANCE, planned

LORA_RANK = 16


def run(device: torch.device, report: StageReport) -> None:
    """Run the checks."""
    for name in SIZES if device.type == "cuda" else ("tiny",):
        sizes = small_model_sizes(device) if name == "tiny" else qwen3_sizes(name)
        for rank in (0, LORA_RANK):
            what = f"LoRA of rank {rank}" if rank else "all weights"
            with report.check(f"{name}, bfloat16, {what}, gradient checkpointing") as check:
                if rank and importlib.util.find_spec("peft") is None:
                    raise NotRun("peft is not installed")
                _train(check, device, sizes, lora_rank=rank)


def _train(check: Check, device: torch.device, sizes: dict[str, Any], *, lora_rank: int) -> None:
    """Measure updates of the policy on rows of full length."""
    is_gpu = device.type == "cuda"
    num_rows, row_tokens = (8, 2048) if is_gpu else (4, 32)
    prompt = row_tokens // 4
    config = Config.model_validate(
        {
            "model": {"device": device.type, "dtype": "bfloat16", "lora_rank": lora_rank},
            "actor": {"max_tokens_per_micro_batch": 4 * row_tokens, "gradient_checkpointing": True},
            "data": {"train_batch_size": num_rows},
            "rollout": {"prompt_length": prompt, "response_length": row_tokens - prompt, "n": 1},
        }
    )
    plan = planned(sizes, config, device)
    expected = max(plan.peak, plan.loading)
    if is_gpu and expected > USABLE_SHARE * free_bytes(device):
        raise NotRun(f"the plan needs {expected / 1e9:.0f} GB")
    peak_memory = PeakMemory(device)
    model = random_model(config_of(sizes), device=device)
    flops = flops_per_token(model, context=row_tokens / 2) * (2 if lora_rank else 3)
    if lora_rank:
        add_adapters(model, config=config.model, seed=0)
    actor = Actor(model, config=config.actor, dtype=torch.bfloat16)
    rows = random_rows([(prompt, row_tokens - prompt)] * num_rows, vocabulary=sizes["vocab_size"])
    batch = as_batch(rows, [[-9.0] * (row_tokens - prompt)] * num_rows)

    def update() -> None:
        actor.update(batch, advantages_BR=torch.ones(1, 1))

    update()  # the warm-up
    if is_gpu:  # on a CPU most of the memory is that of the libraries
        ratio = expected / peak_memory.num_bytes
        check.within("planned / measured memory", ratio, 1 - TOLERANCE, 1 + TOLERANCE)
    rate = num_rows * row_tokens / min(elapsed_s(device, update) for _ in range(3))
    check.figure("trained", rate, "tokens/s")
    peak = peak_flops(device)
    if peak is not None:
        check.figure("of the arithmetic", 100 * rate * flops / peak, "%")
