"""Fast generation of large runs: many trajectories with few tokens, or one trajectory with many tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from agent_loop.storage import SCHEMA
from agent_loop.storage.schema import VOCABULARY_FILE
from tests.viewer.synthetic import PIECES, WORDS, write_rows, write_table

PER_FILE = 500
NEEDLE = "zebra"
"""Text of one message in a thousand."""


def write_many(folder: Path, *, count: int) -> Path:
    """Write a run with `count` trajectories, `PER_FILE` per step."""
    for step, start in enumerate(range(0, count, PER_FILE), start=1):
        table = _table(step, min(PER_FILE, count - start))
        write_table(folder / "trajectories" / f"train-{step:06d}.parquet", table, step=step)
    lines = [
        json.dumps({"step": step, "reward/mean": step / 1000}) for step in range(1, count // PER_FILE + 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_long(folder: Path, *, num_tokens: int) -> Path:
    """Write a run with one trajectory of `num_tokens` tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / VOCABULARY_FILE).write_text(json.dumps({"version": 1, "pieces": PIECES}), encoding="utf-8")
    random = np.random.default_rng(0)
    segments, mask = [*_turns(num_tokens)], []
    for segment in segments[1:]:
        mask += [int(segment["origin"] == "model")] * segment["num_tokens"]
    length = len(mask)
    row: dict[str, Any] = {
        "step": 1,
        "split": "train",
        "trajectory_id": "group=0/rollout=0",
        "group": 0,
        "rollout": 0,
        "reward": 1.0,
        "is_success": True,
        "stop_reason": "answered",
        "prompt_length": segments[0]["num_tokens"],
        "response_length": length,
        "prompt_ids": random.integers(0, len(WORDS), segments[0]["num_tokens"]),
        "response_ids": random.integers(0, len(PIECES), length),
        "response_mask": mask,
        "response_logprobs": -random.gamma(0.6, 0.8, length).astype(np.float32),
        "train_logprobs": -random.gamma(0.6, 0.8, length).astype(np.float32),
        "weight_versions": [0 if kept else -1 for kept in mask],
        "segments": segments,
        "messages": json.dumps([{"role": "user", "content": "word " * 50_000}]),
        "spans": "[]",
    }
    write_rows(folder / "trajectories" / "train-000001.parquet", [row], step=1)
    return folder


def _turns(num_tokens: int) -> Iterator[dict[str, Any]]:
    yield {"origin": "prompt", "num_tokens": 500, "weight_version": None}
    for start in range(500, num_tokens, 2000):
        yield {"origin": "model", "num_tokens": min(1500, num_tokens - start), "weight_version": 0}
        if num_tokens - start > 1500:
            yield {
                "origin": "tool",
                "num_tokens": min(500, num_tokens - start - 1500),
                "weight_version": None,
            }


def _table(step: int, count: int) -> pa.Table:
    random = np.random.default_rng(step)
    groups, rollouts = np.divmod(np.arange(count), 8)
    lengths = random.integers(20, 60, count)
    rewards = random.beta(0.4, 0.6, count)
    seconds = random.gamma(2.0, 4.0, count)
    texts = [NEEDLE if place % 1000 == 0 else "word " * 40 for place in random.integers(0, 1000, count)]
    columns: dict[str, Any] = {
        "step": np.full(count, step),
        "split": ["train"] * count,
        "trajectory_id": [f"group={g}/rollout={r}" for g, r in zip(groups, rollouts, strict=True)],
        "group": groups,
        "rollout": rollouts,
        "weight_version": np.full(count, step - 1),
        "reward": rewards,
        "is_success": rewards > 0.9,
        "stop_reason": random.choice(["answered", "max_assistant_turns", "response_length"], count),
        "num_turns": random.integers(2, 12, count),
        "num_tool_calls": random.integers(0, 6, count),
        "num_failed_calls": random.integers(0, 2, count),
        "num_incidents": random.integers(0, 2, count),
        "prompt_length": random.integers(100, 900, count),
        "response_length": lengths,
        "advantage": random.normal(size=count),
        "logprob_diff_max": random.gamma(1.0, 0.02, count),
        "began_at": 1.79e9 + 60 * step + random.random(count),
        "seconds": seconds,
        "generate_s": seconds * 0.7,
        "tool_s": seconds * 0.2,
        "response_ids": _lists(random.integers(0, len(PIECES), lengths.sum()), lengths),
        "response_mask": _lists(np.ones(lengths.sum()), lengths),
        "messages": [json.dumps([{"role": "user", "content": text}]) for text in texts],
        "answer": [f"It is on shelf {number}." for number in random.integers(0, 5000, count)],
        "row": [_row_of(step, int(group)) for group in groups],
        "reward_extra": [json.dumps({"exact": round(r, 3), "format": r > 0.5}) for r in rewards.tolist()],
        "spans": ["[]"] * count,
    }
    arrays = [
        pa.nulls(count, field.type) if field.name not in columns else _array(columns[field.name], field.type)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _row_of(step: int, group: int) -> str:
    question = f"On which shelf is part {group} of order {step}? " + "word " * 40
    return json.dumps({"raw_prompt": [{"role": "user", "content": question}], "answer": group})


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    return values.cast(kind) if isinstance(values, pa.Array) else pa.array(values).cast(kind)


def _lists(values: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values))
