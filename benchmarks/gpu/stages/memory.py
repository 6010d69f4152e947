"""Peak memory of an update, as `agent-loop plan` predicts it and as measured on the device.

The peak on a GPU is that of torch's allocator, from before the model is created to the end of the first update. The
target is that of the plan on a CPU: at most 15 % of difference. On a CPU the resident size of a tiny model is mostly
that of the libraries, so that only the order of magnitude is checked there.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch

from agent_loop.config import Config
from agent_loop.planning.sizes import UpdateMemory, parse_shape, update_memory
from agent_loop.training.actor import Actor
from agent_loop.training.adapters import add_adapters
from agent_loop.training.policy import compute_dtype
from benchmarks.gpu.devices import GB, PeakMemory, free_bytes
from benchmarks.gpu.models import (
    QWEN3,
    USABLE_SHARE,
    config_of,
    qwen3_sizes,
    random_model,
    small_model_sizes,
)
from benchmarks.gpu.report import Check, NotRun, StageReport
from benchmarks.gpu.rows import as_batch, random_rows

TOLERANCE = 0.15
CPU_TOLERANCE = 0.9
NUM_ROWS = 8
SIZES = ("1.7B", "0.6B")
"""Models to try, large enough that the libraries' own memory does not count."""
HOST_BYTES = 16
"""Bytes per weight of an optimiser on the host: weight, gradient, and both moments."""


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of an update."""

    name: str
    settings: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    needs: str = ""
    """Package that the settings need."""


BFLOAT16 = {"dtype": "bfloat16"}
CASES = (
    Case("float32"),
    Case("bfloat16", {"model": BFLOAT16}),
    Case("bfloat16, gradient checkpointing", {"model": BFLOAT16, "actor": {"gradient_checkpointing": True}}),
    Case(
        "bfloat16, selective checkpointing",
        {"model": BFLOAT16, "actor": {"gradient_checkpointing": "selective"}},
    ),
    Case("bfloat16, optimiser on the host", {"model": BFLOAT16, "actor": {"optimizer_on_host": True}}),
    Case(
        "bfloat16, optimiser in 8 bits",
        {"model": BFLOAT16, "actor": {"optimizer_bits": 8}},
        needs="bitsandbytes",
    ),
    Case("bfloat16, LoRA", {"model": {**BFLOAT16, "lora_rank": 16}}, needs="peft"),
)


def run(device: torch.device, report: StageReport) -> None:
    """Run the checks."""
    _update(small_model_sizes(device), CASES[0], device)  # allocates the workspaces of the libraries
    for case in CASES:
        with report.check(case.name) as check:
            if case.needs and importlib.util.find_spec(case.needs) is None:
                raise NotRun(f"{case.needs} is not installed")
            _compare(case, device, check)


def planned(sizes: dict[str, Any], config: Config, device: torch.device) -> UpdateMemory:
    """Return what the plan says about an update of a model."""
    return update_memory(parse_shape(sizes, where="sizes"), config, on_gpu=device.type == "cuda")


def config_with(case: Case, device: torch.device, *, row_tokens: int) -> Config:
    """Return the configuration of a case, whose micro-batch has all rows."""
    return Config.model_validate(
        {
            "model": {"device": device.type, **case.settings.get("model", {})},
            "actor": {"max_tokens_per_micro_batch": NUM_ROWS * row_tokens, **case.settings.get("actor", {})},
            "data": {"train_batch_size": NUM_ROWS},
            "rollout": {"prompt_length": row_tokens // 4, "response_length": row_tokens * 3 // 4, "n": 1},
        }
    )


def _compare(case: Case, device: torch.device, check: Check) -> None:
    sizes, row_tokens = _largest_that_fits(case, device)
    plan = planned(sizes, config_with(case, device, row_tokens=row_tokens), device)
    expected = max(plan.peak, plan.loading)
    measured = _update(sizes, case, device, row_tokens=row_tokens)
    check.figure("planned", expected / GB, "GB")
    check.figure("measured", measured / GB, "GB")
    tolerance = TOLERANCE if device.type == "cuda" else CPU_TOLERANCE
    check.within("planned / measured", expected / measured, 1 - tolerance, 1 + tolerance)


def _largest_that_fits(case: Case, device: torch.device) -> tuple[dict[str, Any], int]:
    """Return the sizes of the largest Qwen3 model whose plan fits, with fewer layers if none does, and the tokens of a
    row."""
    if device.type == "cpu":
        return {**small_model_sizes(device), "vocab_size": 4000}, 64
    room = USABLE_SHARE * free_bytes(device)
    host_room = USABLE_SHARE * free_bytes(torch.device("cpu"))
    for name in SIZES:
        for num_layers in (QWEN3[name]["num_hidden_layers"], 14):
            sizes = {**qwen3_sizes(name), "num_hidden_layers": num_layers}
            config = config_with(case, device, row_tokens=1024)
            plan = planned(sizes, config, device)
            num_weights = parse_shape(sizes, where="sizes").parameters
            on_host = HOST_BYTES * num_weights if config.actor.optimizer_on_host else 0
            if max(plan.peak, plan.loading) < room and on_host < host_room:
                return sizes, 1024
    raise NotRun(f"the smallest model does not fit into {room / GB:.1f} GB")


def _update(sizes: dict[str, Any], case: Case, device: torch.device, *, row_tokens: int = 64) -> float:
    """Train a random model for a step and return the peak of its memory."""
    config = config_with(case, device, row_tokens=row_tokens)
    prompt, response = config.rollout.prompt_length, config.rollout.response_length
    # One row of each two is shorter, so that the attention has a mask.
    rows = random_rows(
        [(prompt - number % 2, response) for number in range(NUM_ROWS)], vocabulary=sizes["vocab_size"]
    )
    batch = as_batch(rows, [[-5.0] * response] * NUM_ROWS)
    if config.model.lora_rank:
        import peft  # noqa: F401
    peak = PeakMemory(device)
    model = random_model(config_of(sizes), device=device)
    if config.model.lora_rank:
        add_adapters(model, config=config.model, seed=0)
    actor = Actor(model, config=config.actor, dtype=compute_dtype(config.model))
    actor.update(batch, advantages_BR=torch.ones(1, 1))
    return peak.num_bytes
