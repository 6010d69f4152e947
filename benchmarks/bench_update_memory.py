"""Peak memory and CPU time of an update of a model with a large vocabulary.

    python benchmarks/bench_update_memory.py [--quick] [--json FILE]

The policy is a small Qwen3 whose vocabulary has 150,000 tokens. Each update runs in a process of its own: once with the
logits of all sampled tokens at once, and once in blocks of the vocabulary, as the trainer does. Memory is the growth of
the peak resident size during the update, which includes the gradients and the state of the optimiser. The gradients of
both ways are compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from outcome import conclude
from resident_memory import resident_bytes
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from agent_loop.config import ActorConfig
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training import forward
from agent_loop.training.actor import Actor
from agent_loop.training.forward import response_logprobs
from agent_loop.training.micro_batches import micro_batches
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, as_token_ids

VOCABULARY = 150_000
HIDDEN_SIZES = (64, 256)
NUM_TRAJECTORIES = 8
PROMPT_TOKENS, RESPONSE_TOKENS = 40, 160
TARGET_MEMORY = 0.25
TARGET_TIME = 1.0
TOLERANCE = 1e-5
"""Difference of gradients, as a share of the largest."""


@dataclass(frozen=True, slots=True)
class Update:
    """Measurements of one update."""

    peak_mb: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """Measurements of both ways."""

    hidden_size: int
    num_tokens: int
    """Sampled tokens of the update, which are in one micro-batch."""
    full_mb: float
    blocks_mb: float
    full_cpu_s: float
    blocks_cpu_s: float
    gradient_difference: float

    @property
    def memory_ratio(self) -> float:
        return self.blocks_mb / self.full_mb

    @property
    def time_ratio(self) -> float:
        return self.blocks_cpu_s / self.full_cpu_s


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round; missed targets are only printed")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--way", choices=("full", "blocks"), help=argparse.SUPPRESS)
    parser.add_argument("--hidden", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--gradients", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(asdict(_measure(arguments.way, arguments.hidden, arguments.gradients))))
        return
    results = [_compare(hidden, num_rounds=1 if arguments.quick else 3) for hidden in HIDDEN_SIZES]
    _print(results)
    conclude(results, missed=_missed(results), json_file=arguments.json, is_quick=arguments.quick)


def _compare(hidden_size: int, *, num_rounds: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        files = {way: Path(folder, way) for way in ("full", "blocks")}
        rounds = [
            {way: _in_a_process(way, hidden_size, file) for way, file in files.items()}
            for _ in range(num_rounds)
        ]
        full, blocks = (torch.load(file, mmap=True) for file in files.values())
    largest = max(float(each.abs().max()) for each in full.values())
    return Result(
        hidden_size=hidden_size,
        num_tokens=NUM_TRAJECTORIES * RESPONSE_TOKENS,
        full_mb=max(each["full"].peak_mb for each in rounds),
        blocks_mb=max(each["blocks"].peak_mb for each in rounds),
        full_cpu_s=statistics.median(each["full"].cpu_s for each in rounds),
        blocks_cpu_s=statistics.median(each["blocks"].cpu_s for each in rounds),
        gradient_difference=max(float((blocks[n] - full[n]).abs().max()) for n in full) / largest,
    )


def _in_a_process(way: str, hidden_size: int, gradients: Path) -> Update:
    command = [
        sys.executable,
        __file__,
        "--way",
        way,
        "--hidden",
        str(hidden_size),
        "--gradients",
        str(gradients),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return Update(**json.loads(done.stdout.splitlines()[-1]))


def _measure(way: str, hidden_size: int, gradients: Path) -> Update:
    torch.set_num_threads(1)
    actor, batch = Actor(_model(hidden_size), config=ActorConfig(lr=1e-6)), _batch()
    if way == "full":
        forward_module: Any = forward
        forward_module.logit_scaling = lambda model: None
    gc.collect()
    before, start_s = resident_bytes("VmHWM"), time.process_time()
    actor.update(batch, advantages_BR=batch["reward"][:, None])
    cpu_s, after = time.process_time() - start_s, resident_bytes("VmHWM")
    _save_gradients(actor, batch, gradients)
    return Update(peak_mb=(after - before) / 1e6, cpu_s=cpu_s)


def _save_gradients(actor: Actor, batch: RolloutBatch, path: Path) -> None:
    rows, device = torch.arange(len(batch)), torch.device("cpu")
    [part] = micro_batches(batch, rows=rows, max_tokens=100_000, device=device)
    found = response_logprobs(actor.model, part, temperature=0.9)
    (found.sampled_BR.sum() + 0.1 * found.entropy_BR.sum()).backward()
    torch.save({n: p.grad for n, p in actor.model.named_parameters() if p.grad is not None}, path)


def _model(hidden_size: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def _batch() -> RolloutBatch:
    numbers = np.random.default_rng(0)
    trajectories: list[Trajectory] = []
    for row in range(NUM_TRAJECTORIES):
        prompt, response = (
            as_token_ids(numbers.integers(0, VOCABULARY, n).tolist())
            for n in (PROMPT_TOKENS, RESPONSE_TOKENS)
        )
        logprobs = np.full(RESPONSE_TOKENS, -12.0, np.float32)
        segments = [Segment(prompt, Origin.PROMPT), Segment(response, Origin.MODEL, logprobs, 0)]
        output = AgentLoopOutput(segments=segments)
        trajectories.append(
            Trajectory(output, {}, group=0, rollout=row, reward=row % 2 - 0.5, reward_extra={})
        )
    return assemble(trajectories, pad_token_id=0)


def _print(results: list[Result]) -> None:
    table = Table(title=f"update of {results[0].num_tokens} tokens, vocabulary {VOCABULARY:,}")
    for column in (
        "hidden",
        "full, MB",
        "blocks, MB",
        "ratio",
        "full, s",
        "blocks, s",
        "ratio",
        "gradients differ",
    ):
        table.add_column(column, justify="right")
    for each in results:
        table.add_row(
            str(each.hidden_size),
            f"{each.full_mb:.0f}",
            f"{each.blocks_mb:.0f}",
            f"{each.memory_ratio:.3f}",
            f"{each.full_cpu_s:.2f}",
            f"{each.blocks_cpu_s:.2f}",
            f"{each.time_ratio:.2f}",
            f"{each.gradient_difference:.1e}",
        )
    Console().print(table)


def _missed(results: list[Result]) -> list[str]:
    missed: list[str] = []
    for each in results:
        name = f"hidden size {each.hidden_size}"
        if each.memory_ratio > TARGET_MEMORY:
            missed.append(f"{name}: memory is {each.memory_ratio:.2f} of full logits, target {TARGET_MEMORY}")
        if each.time_ratio > TARGET_TIME:
            missed.append(f"{name}: time is {each.time_ratio:.2f} of full logits, target {TARGET_TIME}")
        if each.gradient_difference > TOLERANCE:
            missed.append(f"{name}: gradients differ by {each.gradient_difference:.1e}, target {TOLERANCE}")
    return missed


if __name__ == "__main__":
    main()
