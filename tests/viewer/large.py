"""Fast generation of a run with one trajectory of many tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.storage.schema import VOCABULARY_FILE
from tests.viewer.synthetic import PIECES, WORDS, write_rows


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
