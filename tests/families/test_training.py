"""Tests that families that the shared cache does not support can be trained: rollouts, updates, new weights."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from agent_loop import AgentLoopBase, AgentLoopOutput, register
from agent_loop.config import Config
from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.types import Row
from tests.families.zoo import Family, each_family
from tests.helpers import small_tokenizer, user

pytestmark = pytest.mark.slow

NUM_STEPS = 3
TOLERANCE = 1e-4
"""Largest difference between the log-probs of rollout and trainer, in nats."""
HEAD_SCALE = 0.1
"""Factor on the output head. Without it, the large logits amplify the rounding of linear attention to the tolerance."""


@register("family_asks_twice")
class AsksTwice(AgentLoopBase):
    """Loop with two completions and a user message between them."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        async with self.episode(row["raw_prompt"]) as episode:
            for _ in range(2):
                await episode.generate({**sampling_params, "max_tokens": 8})
                if episode.stop_reason is not None:
                    break
                await episode.observe(user("again"))
            return episode.output()


def share_of_odd_tokens(output: AgentLoopOutput, row: Row) -> float:
    """Return the share of odd tokens, a reward that differs between the rollouts of random models."""
    return sum(token % 2 for token in output.response_ids) / max(1, len(output.response_ids))


@pytest.mark.nightly(keep=4)
@each_family(
    *("gemma2", "gpt_oss", "lfm2", "llama4_text", "mamba", "qwen3_5_text", "qwen3_next"),
    *("gemma2-window", "gpt_oss-window", "llama4_text-chunk"),
)
def test_three_steps_of_grpo_with_equal_logprobs_in_rollout_and_trainer(
    family: Family, tmp_path: Path
) -> None:
    tokenizer = small_tokenizer()
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model = replace(family, changes={**family.changes, **ids}).build()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(HEAD_SCALE)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"say {n}"} for n in range(8)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    config = Config.model_validate(
        {
            "data": {"train_files": [str(tmp_path / "rows.json")], "train_batch_size": 4},
            "model": {"path": str(tmp_path / "model"), "device": "cpu", "dtype": "float32"},
            "rollout": {
                "n": 4,
                "prompt_length": 48,
                "response_length": 48,
                "agent": {"default_agent_loop": "family_asks_twice"},
            },
            "reward": {"function": f"{__name__}:share_of_odd_tokens"},
            "actor": {"lr": 1e-3, "ppo_mini_batches": 1},
            "trainer": {"total_steps": NUM_STEPS, "run_dir": str(tmp_path / "run")},
        }
    )

    result = asyncio.run(PPOTrainer(config, console=Console(file=io.StringIO())).fit())

    lines = [line for line in read_metrics(result.run_dir / "metrics.jsonl") if line["step"] > 0]
    assert len(lines) == NUM_STEPS
    for line in lines:
        assert line[names.LOGPROB_DIFF_MAX] < TOLERANCE
        assert line[names.GRAD_NORM] > 0
