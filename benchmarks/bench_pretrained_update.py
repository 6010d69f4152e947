"""Time and peak memory of updates of a pretrained model: rows and logits laid out in each way, and LoRA.

    python benchmarks/bench_pretrained_update.py MODEL [--dtype float32] [--threads 2] [--json FILE]

A batch is a group of eight rows. A row has 215 tokens of prompt, which its group shares, a call of 37 tokens, 25
tokens of the tool, and an answer of 10. Each way runs in a process of its own: one update that is not measured, and
one that is. Memory is the largest resident size above that before the model was loaded; it includes weights, master
weights, gradients, and the optimiser's state.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from batches import to_batch
from outcome import conclude
from resident_memory import resident_bytes
from rich.console import Console
from rich.table import Table
from training_rounds import run_in_new_process

from agent_loop.config import ActorConfig, ModelConfig
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import forward
from agent_loop.training.actor import Actor
from agent_loop.training.policy import compute_dtype, load_policy

GROUP_SIZE = 8
PROMPT_TOKENS, CALL_TOKENS, TOOL_TOKENS, ANSWER_TOKENS = 215, 37, 25, 10
PLAIN, BLOCKS, TREES, LORA = "padded rows, all logits", "blocks of logits", "and prefix trees", "and LoRA"
WAYS = (PLAIN, BLOCKS, TREES, LORA)
"""Ways of an update; each has what the one before it has. The third is the default."""
RANK = 16


@dataclass(frozen=True, slots=True)
class Update:
    """Measurements of one update."""

    way: str
    wall_s: float
    cpu_s: float
    peak_mb: float
    tokens_per_s: float
    """Tokens of prompts and responses of all rows, per second of wall time."""


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    updates = [
        run_in_new_process(measure, way, options.model, dtype=options.dtype, threads=options.threads)
        for way in WAYS
    ]
    print_table(updates, dtype=options.dtype)
    conclude(updates, missed=(), json_file=options.json, is_quick=False)


def measure(way: str, model_path: Path, *, dtype: str, threads: int) -> Update:
    """Measure one update, after one that is not measured."""
    torch.set_num_threads(threads)
    if way == PLAIN:
        forward_module: Any = forward
        forward_module.logit_scaling = lambda model: None
    transformers.utils.logging.disable_progress_bar()
    before = resident_bytes("VmRSS")
    model_config = ModelConfig(path=str(model_path), dtype=dtype, lora_rank=RANK if way == LORA else 0)
    config = ActorConfig(lr=1e-6, share_prefixes=way in (TREES, LORA), max_tokens_per_micro_batch=2048)
    actor = Actor(load_policy(model_config), config=config, dtype=compute_dtype(model_config))
    batch = make_batch(actor.model.config.vocab_size)
    advantages_BR = torch.linspace(-1, 1, len(batch))[:, None]
    actor.update(batch, advantages_BR=advantages_BR)
    wall, cpu = time.perf_counter(), time.process_time()
    actor.update(batch, advantages_BR=advantages_BR)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return Update(
        way=way,
        wall_s=wall_s,
        cpu_s=cpu_s,
        peak_mb=(resident_bytes("VmHWM") - before) / 1e6,
        tokens_per_s=int(batch["attention_mask"].sum()) / wall_s,
    )


def make_batch(vocab_size: int) -> RolloutBatch:
    """Return a group of rows of random tokens."""
    random = Random(0)

    def tokens(number: int) -> list[int]:
        return random.choices(range(1, vocab_size), k=number)

    prompt = tokens(PROMPT_TOKENS)
    return to_batch(
        [
            (
                prompt,
                [(tokens(CALL_TOKENS), True), (tokens(TOOL_TOKENS), False), (tokens(ANSWER_TOKENS), True)],
            )
            for _ in range(GROUP_SIZE)
        ]
    )


def print_table(updates: list[Update], *, dtype: str) -> None:
    table = Table(title=f"update of {GROUP_SIZE} rows that share a prompt, in {dtype}")
    for column in ("way", "seconds", "to the first", "CPU, s", "tokens/s", "memory, MB", "to the first"):
        table.add_column(column, justify="left" if column == "way" else "right")
    first = updates[0]
    for each in updates:
        table.add_row(
            each.way,
            f"{each.wall_s:.1f}",
            f"{each.wall_s / first.wall_s:.2f}",
            f"{each.cpu_s:.1f}",
            f"{each.tokens_per_s:.0f}",
            f"{each.peak_mb:.0f}",
            f"{each.peak_mb / first.peak_mb:.2f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
