"""Tokens per second of the embedded engine and of the trainer, and the share of the device's peak arithmetic.

The arithmetic is that of the model: 2 operations per weight and token in a forward pass and 6 in training, without the
embedding, and that of attention over half of each row. Computing activations again is not counted. There is no target.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from agent_loop.config import Config
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.training.actor import Actor
from agent_loop.types import SamplingParams
from tests.gpu.completions import complete, random_prompts
from tests.gpu.devices import elapsed_s, free_bytes, peak_flops
from tests.gpu.models import QWEN3, config_of, qwen3_sizes, random_model
from tests.gpu.report import Check, NotRun, StageReport
from tests.gpu.rows import as_batch, random_rows
from tests.gpu.stages.memory import USABLE_SHARE, planned, small_model_sizes

BATCHES = (1, 16, 64)


def run(device: torch.device, report: StageReport) -> None:
    """Run the checks."""
    peak = peak_flops(device)
    if device.type == "cuda" and peak is None:
        name = torch.cuda.get_device_name(device)
        print(f"throughput: the peak of {name!r} is not known, so that no share is printed", flush=True)
    for name in QWEN3 if device.type == "cuda" else ("tiny",):
        for batch in BATCHES if device.type == "cuda" else BATCHES[:2]:
            with report.check(f"engine, {name}, bfloat16, batch {batch}") as check:
                _decode(check, device, sizes_of(name, device), batch=batch, peak=peak)
    for name in QWEN3 if device.type == "cuda" else ("tiny",):
        for checkpointing in (False, True):
            how = "gradient checkpointing" if checkpointing else "activations kept"
            with report.check(f"trainer, {name}, bfloat16, {how}") as check:
                sizes = sizes_of(name, device)
                _train(check, device, sizes, gradient_checkpointing=checkpointing, peak=peak)


def sizes_of(name: str, device: torch.device) -> dict[str, Any]:
    return small_model_sizes(device) if name == "tiny" else qwen3_sizes(name)


def flops_per_token(model: Any, *, context: float) -> float:
    """Return the operations of a forward pass per token, with so many tokens of context on average."""
    config = model.config
    embedding = model.get_input_embeddings().weight
    num_weights = sum(weight.numel() for weight in model.parameters())
    if not config.tie_word_embeddings:
        num_weights -= embedding.numel()  # looking up a row is no product; a tied one is the head's too
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * context
    return 2 * num_weights + attention


def _decode(
    check: Check, device: torch.device, sizes: dict[str, Any], *, batch: int, peak: float | None
) -> None:
    """Measure the decoding of a batch: the difference between two lengths, so that the prompts do not count."""
    is_gpu = device.type == "cuda"
    prompt, num_tokens = (256, 256) if is_gpu else (16, 24)
    context = prompt + num_tokens
    config = config_of(sizes)
    num_weights = _num_weights(config, device)
    kv_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * context * batch
    if is_gpu and 2 * num_weights + kv_bytes > USABLE_SHARE * free_bytes(device):
        raise NotRun("the weights and the cache do not fit")
    model = random_model(config, device=device, dtype=torch.bfloat16)
    prompts = random_prompts([prompt] * batch, vocabulary=config.vocab_size)

    async def measure() -> float:
        options = {"max_slots": batch, "max_model_len": context, "verify": not is_gpu}
        server = EmbeddedServer(model, config=EmbeddedConfig(device=device.type, **options))
        try:
            seconds: dict[int, float] = {}
            for number, length in enumerate((8, 8, num_tokens)):  # the first one is the warm-up
                params = SamplingParams(temperature=1, max_tokens=length, ignore_eos=True, seed=number)
                begun = asyncio.get_running_loop().time()
                await complete(server, prompts, params, session=f"run-{number}")
                seconds[length] = asyncio.get_running_loop().time() - begun
            return batch * (num_tokens - 8) / (seconds[num_tokens] - seconds[8])
        finally:
            await server.close()

    rate = asyncio.run(measure())
    check.require(rate > 0, "the measured time is not positive")
    check.figure("decoded", rate, "tokens/s")
    _share(check, rate * flops_per_token(model, context=prompt + num_tokens / 2), peak)


def _num_weights(config: Any, device: torch.device) -> int:
    """Return the number of weights, without allocating them."""
    model = random_model(config, device=torch.device("meta"))
    return sum(weight.numel() for weight in model.parameters())


def _train(
    check: Check,
    device: torch.device,
    sizes: dict[str, Any],
    *,
    gradient_checkpointing: bool,
    peak: float | None,
) -> None:
    """Measure updates of the policy on rows of full length."""
    is_gpu = device.type == "cuda"
    num_rows, row_tokens = (8, 2048) if is_gpu else (4, 32)
    prompt = row_tokens // 4
    config = Config.model_validate(
        {
            "model": {"device": device.type, "dtype": "bfloat16"},
            "actor": {
                "max_tokens_per_micro_batch": 4 * row_tokens,
                "gradient_checkpointing": gradient_checkpointing,
            },
            "data": {"train_batch_size": num_rows},
            "rollout": {"prompt_length": prompt, "response_length": row_tokens - prompt, "n": 1},
        }
    )
    plan = planned(sizes, config, device)
    if is_gpu and max(plan.peak, plan.loading) > USABLE_SHARE * free_bytes(device):
        raise NotRun(f"the plan needs {max(plan.peak, plan.loading) / 1e9:.0f} GB")
    model = random_model(config_of(sizes), device=device)
    actor = Actor(model, config=config.actor, dtype=torch.bfloat16)
    rows = random_rows([(prompt, row_tokens - prompt)] * num_rows, vocabulary=sizes["vocab_size"])
    batch = as_batch(rows, [[-9.0] * (row_tokens - prompt)] * num_rows)

    def update() -> None:
        actor.update(batch, advantages_BR=torch.ones(1, 1))

    update()  # the warm-up
    rate = num_rows * row_tokens / min(elapsed_s(device, update) for _ in range(3))
    check.figure("trained", rate, "tokens/s")
    _share(check, rate * 3 * flops_per_token(actor.model, context=row_tokens / 2), peak)


def _share(check: Check, flops: float, peak: float | None) -> None:
    check.figure("model", flops / 1e12, "TFLOP/s")
    if peak is not None:
        check.figure("of the peak", 100 * flops / peak, "%")
