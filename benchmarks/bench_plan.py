"""Peak memory of an update, as `agent-loop plan` predicts it and as measured, for small models on the CPU.

    python benchmarks/bench_plan.py [--only NAME] [--json FILE]

Each model has random weights and is trained for one step in a process of its own. The measured peak is the highest
resident size above that before the model was created. The target is a difference of at most 15 %.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcome import conclude
from resident_memory import resident_bytes
from rich.console import Console
from rich.table import Table

from agent_loop.config import Config
from agent_loop.planning.sizes import parse_shape, update_memory

TARGET = 0.15
MB = 1e6
DENSE: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8000,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the settings of its update."""

    name: str
    sizes: dict[str, Any]
    settings: dict[str, Any]


CASES = [
    Case("llama, float32", {"model_type": "llama", **DENSE}, {}),
    Case(
        "qwen2, tied, large vocabulary",
        {
            "model_type": "qwen2",
            **DENSE,
            "vocab_size": 60000,
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
        },
        {},
    ),
    Case(
        "qwen3, gradient checkpointing",
        {"model_type": "qwen3", **DENSE, "num_hidden_layers": 10},
        {"actor": {"gradient_checkpointing": True}},
    ),
    Case(
        "qwen3, selective checkpointing",
        {"model_type": "qwen3", **DENSE, "num_hidden_layers": 10},
        {"actor": {"gradient_checkpointing": "selective"}},
    ),
    Case(
        "llama, optimizer on the host",
        {"model_type": "llama", **DENSE},
        {"actor": {"optimizer_on_host": True}},
    ),
    Case(
        "llama, optimizer with 8 bits",
        {"model_type": "llama", **DENSE, "hidden_size": 768, "intermediate_size": 2048},
        {"actor": {"optimizer_bits": 8, "gradient_checkpointing": True}},
    ),
    Case("qwen3, bfloat16", {"model_type": "qwen3", **DENSE}, {"model": {"dtype": "bfloat16"}}),
    Case(
        "mistral, LoRA",
        {"model_type": "mistral", **DENSE, "hidden_size": 512, "intermediate_size": 1536},
        {"model": {"lora_rank": 16}},
    ),
    Case(
        "mistral, LoRA on 4 bits",
        {"model_type": "mistral", **DENSE, "hidden_size": 512, "intermediate_size": 1536},
        {"model": {"lora_rank": 16, "base_bits": 4}},
    ),
    Case(
        "qwen3_moe, 16 experts",
        {
            "model_type": "qwen3_moe",
            **DENSE,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 256,
            "num_experts": 16,
            "num_experts_per_tok": 4,
        },
        {},
    ),
]
ROW = {"prompt_length": 128, "response_length": 384}
NUM_ROWS = 8
MAX_TOKENS = 2048
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Make the C library return freed memory at once, so that the resident size is that of live tensors."""


@dataclass(frozen=True, slots=True)
class Result:
    """Bytes of one case."""

    name: str
    planned: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.planned / self.measured


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="measure this case alone")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(measure(next(case for case in CASES if case.name == arguments.measure)))
        return
    results = [result_of(case) for case in CASES if arguments.only in (None, case.name)]
    table = Table(title="Peak memory of an update above the process, MB")
    for column in ("model", "planned", "measured", "planned / measured"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for result in results:
        planned, measured = result.planned / MB, result.measured / MB
        table.add_row(result.name, f"{planned:.0f}", f"{measured:.0f}", f"{result.ratio:.2f}")
    Console().print(table)
    missed = [f"{each.name}: {each.ratio:.2f}" for each in results if abs(each.ratio - 1) > TARGET]
    conclude(results, missed=missed, json_file=arguments.json, is_quick=False)


def settings_of(case: Case) -> Config:
    """Return the configuration of a case."""
    return Config.model_validate(
        {
            "model": {"device": "cpu", **case.settings.get("model", {})},
            "actor": {"max_tokens_per_micro_batch": MAX_TOKENS, **case.settings.get("actor", {})},
            "data": {"train_batch_size": NUM_ROWS},
            "rollout": {**ROW, "n": 1},
        }
    )


def result_of(case: Case) -> Result:
    """Compute and measure the peak of a case."""
    shape = parse_shape(case.sizes, where=case.name)
    planned = update_memory(shape, settings_of(case), on_gpu=False).peak
    done = subprocess.run(
        [sys.executable, __file__, "--measure", case.name],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **MALLOC},
    )
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stderr}")
    return Result(case.name, planned, float(done.stdout))


def measure(case: Case) -> float:
    """Train a random model for a step and return the peak of the resident size above that before, in bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from agent_loop.training.actor import Actor
    from agent_loop.training.adapters import add_adapters
    from agent_loop.training.policy import compute_dtype, load_base

    torch.set_num_threads(1)
    config = settings_of(case)
    warm_up = torch.nn.Linear(8, 8)
    warm_up(torch.ones(2, 8)).sum().backward()
    batch = make_batch(case.sizes["vocab_size"])
    if config.model.lora_rank:
        import peft  # noqa: F401  # pyright: ignore[reportUnusedImport]
    if config.model.base_bits or config.actor.optimizer_bits == 8:
        import bitsandbytes  # noqa: F401  # pyright: ignore[reportUnusedImport, reportMissingImports]
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before = resident_bytes("VmRSS")
    known: Any = AutoConfig
    model_config: Any = known.for_model(
        **{
            **case.sizes,
            "max_position_embeddings": 2048,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
        }
    )
    make: Any = AutoModelForCausalLM
    model: Any = make.from_config(model_config, dtype=torch.float32)
    if config.model.base_bits:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = load_base(config.model, path=folder)
    if config.model.lora_rank:
        add_adapters(model, config=config.model, seed=0)
    actor = Actor(
        model,
        config=config.actor,
        dtype=compute_dtype(config.model),
    )
    actor.update(batch, advantages_BR=torch.ones(1, 1))
    return resident_bytes("VmHWM") - before


def make_batch(vocabulary: int) -> Any:
    """Return rows of full length with random tokens."""
    import numpy as np

    from agent_loop.rollout.batch import assemble
    from agent_loop.trajectory import AgentLoopOutput, Trajectory

    generator = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in generator.integers(1, vocabulary, count)]

    def row(index: int) -> Trajectory:
        # One row of each micro-batch is shorter, so that the attention has a mask.
        prompt, response = tokens(ROW["prompt_length"] - index % 2), tokens(ROW["response_length"])
        output = AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=response,
            response_mask=[1] * len(response),
            response_logprobs=[-5.0] * len(response),
        )
        return Trajectory(output=output, row={}, group=index, rollout=0, reward=1.0, reward_extra={})

    return assemble([row(index) for index in range(NUM_ROWS)], pad_token_id=0)


if __name__ == "__main__":
    main()
