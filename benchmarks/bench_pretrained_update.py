"""Time and peak memory of updates of a pretrained model: rows and logits laid out in each way, and LoRA.

    python benchmarks/bench_pretrained_update.py MODEL [--threads 2] [--json FILE]

A batch is a group of eight rows. A row has 215 tokens of prompt, which its group shares, a call of 37 tokens, 25
tokens of the tool, and an answer of 10. Each way runs in a process of its own, in float32: one
update that is not measured, and one that is. Memory is the largest resident size above that before the model was
loaded; it includes weights, master weights, gradients, and the optimiser's state.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from outcome import conclude
from resident_memory import resident_bytes
from rich.console import Console
from rich.table import Table

from agent_loop.config import ActorConfig, ModelConfig
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training import forward
from agent_loop.training.actor import Actor
from agent_loop.training.policy import compute_dtype, load_policy
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, as_token_ids

NUM_GROUPS, GROUP_SIZE = 1, 8
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
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(asdict(measure(options.way, options.model, threads=options.threads))))
        return
    updates = [_in_a_process(way, options.model, threads=options.threads) for way in WAYS]
    print_table(updates)
    conclude(updates, missed=(), json_file=options.json, is_quick=False)


def measure(way: str, model_path: Path, *, threads: int) -> Update:
    """Measure one update, after one that is not measured."""
    torch.set_num_threads(threads)
    if way == PLAIN:
        forward_module: Any = forward
        forward_module.logit_scaling = lambda model: None
    transformers.utils.logging.disable_progress_bar()
    before = resident_bytes("VmRSS")
    model_config = ModelConfig(path=str(model_path), dtype="float32", lora_rank=RANK if way == LORA else 0)
    config = ActorConfig(lr=1e-6, share_prefixes=way in (TREES, LORA), max_tokens_per_micro_batch=2048)
    actor = Actor(load_policy(model_config), config=config, dtype=compute_dtype(model_config))
    batch = make_batch(actor.model.config.vocab_size)
    advantages_BR = batch["reward"][:, None]
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
    """Return rows of random tokens. Half of each group have a reward of 0.5, and the others -0.5."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> Any:
        return as_token_ids(rng.integers(1, vocab_size, count).tolist())

    def sampled(count: int) -> Segment:
        return Segment(tokens(count), Origin.MODEL, np.full(count, -1.0, np.float32), 0)

    trajectories: list[Trajectory] = []
    for group in range(NUM_GROUPS):
        prompt = tokens(PROMPT_TOKENS)
        for rollout in range(GROUP_SIZE):
            segments = [
                Segment(prompt, Origin.PROMPT),
                sampled(CALL_TOKENS),
                Segment(tokens(TOOL_TOKENS), Origin.TOOL),
                sampled(ANSWER_TOKENS),
            ]
            output = AgentLoopOutput(segments=segments)
            reward = rollout % 2 - 0.5
            trajectories.append(
                Trajectory(output, {}, group=group, rollout=rollout, reward=reward, reward_extra={})
            )
    return assemble(trajectories, pad_token_id=0)


def print_table(updates: list[Update]) -> None:
    num_rows = NUM_GROUPS * GROUP_SIZE
    table = Table(title=f"update of {num_rows} rows in groups of {GROUP_SIZE}")
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


def _in_a_process(way: str, model_path: Path, *, threads: int) -> Update:
    command = [sys.executable, __file__, str(model_path), "--threads", str(threads), "--way", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Update(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
