"""Project of a user: a tiny model, rows, a reward and a configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.helpers import small_tokenizer

AGENT_LOOP = Path(sys.executable).with_name("agent-loop")


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command."""

    exit_code: int
    out: str
    err: str


Command = Callable[..., Result]
TASK = """
def reward(output, row):
    return float(len(output.response_ids) % 2)

def breaks(output, row):
    return 1.0 / 0

def crawls(output, row):
    return [].index("nothing")
"""


def save_model(folder: Path) -> Path:
    """Write a tiny model with its tokenizer, and return its folder."""
    tokenizer = small_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **sizes,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def make_project(folder: Path) -> Path:
    """Write the project and return its configuration file."""
    save_model(folder)
    (folder / "task.py").write_text(TASK, encoding="utf-8")
    rows = [{"prompt": f"question {n}"} for n in range(6)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = {
        "data": {"train_files": ["rows.jsonl"], "val_files": ["rows.jsonl"], "train_batch_size": 2},
        "model": {"path": "model"},
        "reward": {"function": "task.py:reward"},
        "rollout": {"n": 2, "prompt_length": 64, "response_length": 8, "engine_kwargs": {"max_slots": 8}},
        "actor": {"lr": 1e-3},
        "trainer": {"total_steps": 3, "run_dir": "run", "save_every": 2},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path
