"""CPU time to create a padded batch of finished trajectories, relative to padding row by row.

    python benchmarks/bench_batch.py [--quick] [--json FILE]

The peer pads each row separately, as is common: `tokenizer.pad` pads the prompt on the left, and the response and its
mask on the right. Positions come from the mask, and all tensors are concatenated at the end. Trajectories are short
(470 tokens, three turns of 100) or long (2000 tokens, ten turns of 500). The batch is as wide as its longest row, or
2048 + 16384. Times are medians of alternating rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_encoding import Writer, cpu_seconds, make_tokenizer
from rich.console import Console
from rich.table import Table

from agent_loop.rollout.batch import assemble
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, StopReason, as_token_ids

NUM_ROWS = 64
PAD = 0
WIDE = (2048, 16384)
WORKLOADS = {"short": (470, 3, 100, 78), "long": (2000, 10, 500, 500)}
"""Tokens of the prompt, number of turns, tokens of a turn and of a tool result, each plus or minus 10 %."""
TARGET_RATIO = 5.0
"""Least accepted speedup over row-by-row padding."""


def make_trajectories(name: str, *, seed: int = 0) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    prompt, num_turns, turn, reply = WORKLOADS[name]

    def ids(about: int) -> Any:
        return as_token_ids(rng.integers(1, 8000, int(about * rng.uniform(0.9, 1.1)), np.int32))

    trajectories: list[Trajectory] = []
    for row in range(NUM_ROWS):
        segments = [Segment(ids(prompt)[: WIDE[0]], Origin.PROMPT)]
        for number in range(num_turns):
            sampled = ids(turn)
            segments.append(Segment(sampled, Origin.MODEL, np.full(len(sampled), -0.5, np.float32), 1))
            if number < num_turns - 1:
                segments.append(Segment(ids(reply), Origin.TOOL))
        output = AgentLoopOutput(segments=segments, stop_reason=StopReason.ANSWERED)
        trajectories.append(
            Trajectory(output=output, row={}, group=row // 8, rollout=row % 8, reward=1.0, reward_extra={})
        )
    return trajectories


def row_by_row(
    trajectories: Sequence[Trajectory], *, tokenizer: Any, prompt_width: int, response_width: int
) -> dict[str, torch.Tensor]:
    """Return the same columns of tokens as `assemble`, with each row padded by the tokenizer."""

    def padded(values: Any, *, width: int, side: str) -> Any:
        tokenizer.padding_side = side
        row = {"input_ids": values.tolist()}
        return tokenizer.pad(row, padding="max_length", max_length=width, return_tensors="pt")

    rows: list[dict[str, torch.Tensor]] = []
    for trajectory in trajectories:
        output = trajectory.output
        prompt = padded(output.prompt_ids, width=prompt_width, side="left")
        response = padded(output.response_ids, width=response_width, side="right")
        mask = padded(output.response_mask, width=response_width, side="right")
        logprobs = output.response_logprobs.tolist()
        attention_mask = torch.cat([prompt["attention_mask"], response["attention_mask"]])
        rows.append(
            {
                "prompts": prompt["input_ids"],
                "responses": response["input_ids"],
                "response_mask": mask["input_ids"] * response["attention_mask"],
                "input_ids": torch.cat([prompt["input_ids"], response["input_ids"]]),
                "attention_mask": attention_mask,
                "position_ids": (attention_mask.cumsum(0) - 1) * attention_mask,
                "rollout_log_probs": torch.tensor(logprobs + [0.0] * (response_width - len(logprobs))),
            }
        )
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def compare(name: str, *, is_wide: bool, tokenizer: Any, num_rounds: int) -> dict[str, float]:
    """Return the milliseconds per trajectory of both ways."""
    trajectories = make_trajectories(name)
    longest = [
        max(len(ids) for ids in column)
        for column in zip(*((t.output.prompt_ids, t.output.response_ids) for t in trajectories), strict=True)
    ]
    prompt_width, response_width = WIDE if is_wide else longest
    widths = {"prompt_width": prompt_width, "response_width": response_width}
    ways = {
        "assemble": lambda: assemble(trajectories, pad_token_id=PAD, **widths),
        "row by row": lambda: row_by_row(trajectories, tokenizer=tokenizer, **widths),
    }
    batch, peer = ways["assemble"](), ways["row by row"]()
    for column, values in peer.items():
        if not torch.equal(batch[column], values):
            raise SystemExit(f"{name}, {widths}: {column} differs")
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(num_rounds):
        for way, work in ways.items():
            times[way].append(cpu_seconds(work))
    return {way: statistics.median(values) / NUM_ROWS * 1e3 for way, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds; the target is not enforced")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all medians to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(Writer(seed=0))
    tokenizer.pad_token_id = PAD
    table = Table(
        "trajectories", "width", "row by row, ms", "assemble, ms", "ratio", title="CPU per trajectory"
    )
    results: dict[str, dict[str, float]] = {}
    for name in WORKLOADS:
        for is_wide in (False, True):
            key = f"{name}, {'2048 + 16384' if is_wide else 'longest'}"
            found = compare(name, is_wide=is_wide, tokenizer=tokenizer, num_rounds=3 if options.quick else 9)
            results[key] = found
            slow, quick = found["row by row"], found["assemble"]
            table.add_row(*key.split(", "), f"{slow:.3f}", f"{quick:.3f}", f"{slow / quick:.1f}")
    Console(width=120).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    missed = [key for key, found in results.items() if found["row by row"] < TARGET_RATIO * found["assemble"]]
    if missed and not options.quick:
        raise SystemExit(f"missed: less than {TARGET_RATIO} times as fast as row by row: {missed}")


if __name__ == "__main__":
    main()
