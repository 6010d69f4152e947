"""The supervised loss equals that of TRL's `SFTTrainer` on the same tokens."""

from __future__ import annotations

import asyncio
import io
import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_loop.config import Config
from agent_loop.rollout.components import load_template
from agent_loop.training import metrics as names
from agent_loop.training.supervised.examples import load_examples
from agent_loop.training.supervised.trainer import SupervisedTrainer
from examples.common.demonstrations import Habit, demonstrations
from examples.run import tool_schemas
from examples.two_hop_lookup import task

trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning"),
]

NUM_CHATS = 8


@pytest.fixture
def sft_config(task_config: Config, tmp_path: Path) -> Config:
    """Return the configuration of one supervised step on conversations with calls, of different lengths."""
    path, tools = tmp_path / "chats.jsonl", tool_schemas(task, task_config)
    found = demonstrations(task, rng=random.Random(0), habit=Habit(first_step_share=0.5))
    chats = [{"messages": messages, "tools": tools} for messages in islice(found, NUM_CHATS)]
    path.write_text("\n".join(map(json.dumps, chats)))
    return task_config.model_copy(
        update={
            "sft": task_config.sft.model_copy(update={"files": [str(path)], "batch_size": NUM_CHATS}),
            "trainer": task_config.trainer.model_copy(
                update={"total_steps": 1, "val_every": None, "run_dir": str(tmp_path / "run")}
            ),
        }
    )


def loss_of_trl(config: Config, folder: Path) -> float:
    """Return the loss of `SFTTrainer` on the tokens and masks of our examples."""
    from datasets import Dataset

    examples = load_examples(config.sft.files, config=config.sft, template=load_template(config))
    rows: list[dict[str, Any]] = []
    for trajectory in examples.trajectories:
        output = trajectory.output
        prompt = output.prompt_ids.tolist()
        rows.append(
            {
                "input_ids": prompt + output.response_ids.tolist(),
                "completion_mask": [0] * len(prompt) + output.response_mask.tolist(),
            }
        )
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32),
        args=trl.SFTConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=len(rows),
            max_steps=1,
            logging_steps=1,
            learning_rate=0.0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            completion_only_loss=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(config.model.path),
    )
    trainer.train()
    return next(line["loss"] for line in trainer.state.log_history if "loss" in line)


def test_the_loss_of_a_step_is_that_of_trl(sft_config: Config, tmp_path: Path) -> None:
    result = asyncio.run(SupervisedTrainer(sft_config, console=Console(file=io.StringIO())).fit())

    assert result.metrics[names.SFT_LOSS] == pytest.approx(
        loss_of_trl(sft_config, tmp_path / "trl"), abs=1e-5
    )
