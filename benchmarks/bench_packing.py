"""CPU time of a forward and backward pass over trajectories of different lengths, with and without packing.

    python benchmarks/bench_packing.py [--quick]

Response lengths are log-normal, and the model is a small Qwen3 on a CPU. Without packing, each row is padded and rows
are sorted by length (`actor.use_packing=false`). With packing, rows share lines. The table shows medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training.micro_batches import micro_batches
from agent_loop.training.packing import pack
from agent_loop.training.policy import response_logprobs
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, as_token_ids

VOCABULARY = 4000
BUDGETS = (2048, 8192)
"""Token budgets of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Measurements of one pass over the batch."""

    cpu_s: float
    num_tokens: int
    """Number of tokens of the model's inputs, including padding."""


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    quick: bool = parser.parse_args().quick
    torch.set_num_threads(1)
    model, batch = make_model(), make_batch(num_rows=16 if quick else 48)
    table = Table(title=f"{len(batch)} trajectories, {int(batch['attention_mask'].sum())} tokens")
    for column in ("budget", "padded, tokens", "packed, tokens", "padded, s", "packed, s", "ratio"):
        table.add_column(column, justify="right")
    for budget in BUDGETS:
        rounds = [
            (run(model, batch, budget=budget, packs=False), run(model, batch, budget=budget, packs=True))
            for _ in range(1 if quick else 3)
        ]
        padded_s, packed_s = (statistics.median(passes[way].cpu_s for passes in rounds) for way in (0, 1))
        padded, packed = rounds[0]
        table.add_row(
            f"{budget}",
            f"{padded.num_tokens}",
            f"{packed.num_tokens}",
            f"{padded_s:.2f}",
            f"{packed_s:.2f}",
            f"{padded_s / packed_s:.2f}",
        )
    Console().print(table)


def run(model: PreTrainedModel, batch: RolloutBatch, *, budget: int, packs: bool) -> Pass:
    """Compute the log-probs of all rows and their gradients."""
    num_tokens = 0
    start_s = time.process_time()
    for micro_batch in micro_batches(
        batch, rows=torch.arange(len(batch)), max_tokens=budget, device=model.device, use_packing=packs
    ):
        logprobs_BR = response_logprobs(model, micro_batch, temperature=1.0).sampled_BR
        logprobs_BR[micro_batch.mask_BR.bool()].sum().backward()
        num_tokens += (pack(micro_batch).input_ids_KL if packs else micro_batch.input_ids_BW).numel()
    return Pass(time.process_time() - start_s, num_tokens)


def make_model() -> PreTrainedModel:
    """Return a Qwen3 model with four layers and 1.2 million random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def make_batch(*, num_rows: int) -> RolloutBatch:
    """Return a batch with prompts of 50 to 200 tokens and log-normal response lengths with a median of about 150."""
    numbers = np.random.default_rng(0)
    trajectories: list[Trajectory] = []
    for row in range(num_rows):
        num_prompt = int(numbers.integers(50, 200))
        num_response = int(min(1500, numbers.lognormal(5.0, 0.8))) + 5
        prompt, response = (
            as_token_ids(numbers.integers(0, VOCABULARY, n).tolist()) for n in (num_prompt, num_response)
        )
        segments = [
            Segment(prompt, Origin.PROMPT),
            Segment(response, Origin.MODEL, np.full(num_response, -1.0, np.float32), 0),
        ]
        trajectories.append(
            Trajectory(
                output=AgentLoopOutput(segments=segments),
                row={},
                group=row,
                rollout=0,
                reward=0.0,
                reward_extra={},
            )
        )
    return assemble(trajectories, pad_token_id=0)


if __name__ == "__main__":
    main()
