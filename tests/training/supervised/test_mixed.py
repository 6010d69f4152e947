"""Supervised steps between the steps of a training with rollouts."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM

from agent_loop.config import Config, load_config
from agent_loop.errors import ConfigError
from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.run import TrainResult
from tests.cli.project import make_project
from tests.helpers import user


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return a run whose rewards are all equal, so that only the supervised steps change the weights."""
    path = make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text("def reward(output, row):\n    return 0.0\n")
    write_chats(tmp_path, num_chats=6)
    settings = yaml.safe_load(path.read_text())
    settings["sft"] = {"files": ["chats.jsonl"], "batch_size": 3, "every": 2}
    settings["trainer"] |= {"total_steps": 4, "max_dead_steps": 2}
    path.write_text(yaml.safe_dump(settings))
    return load_config(path)


def write_chats(folder: Path, *, num_chats: int) -> None:
    chats = [
        {"messages": [*user(f"{n}?"), {"role": "assistant", "content": f"{n}"}]} for n in range(num_chats)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))


def changed(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def train(config: Config, **options: Any) -> TrainResult:
    return asyncio.run(PPOTrainer(config, console=Console(file=io.StringIO()), **options).fit())


def lines_of(result: TrainResult) -> list[dict[str, float]]:
    return list(read_metrics(result.run_dir / "metrics.jsonl"))


def weights_of(result: TrainResult) -> dict[str, torch.Tensor]:
    assert result.checkpoint is not None
    return AutoModelForCausalLM.from_pretrained(result.checkpoint / "model", dtype="float32").state_dict()


def test_a_supervised_step_follows_every_second_step_and_ends_a_row_of_dead_steps(config: Config) -> None:
    lines = lines_of(train(config))

    assert [names.SFT_LOSS in line for line in lines] == [False, True, False, True]
    assert [line[names.DEAD_STEPS] for line in lines] == [1, 0, 1, 0]
    assert lines[3][names.SFT_LOSS] < lines[1][names.SFT_LOSS]


def test_a_resumed_run_continues_with_the_same_examples(config: Config, tmp_path: Path) -> None:
    whole = train(config)
    half = changed(config, "trainer", total_steps=2, run_dir=str(tmp_path / "half"))
    train(half)

    resumed = train(changed(half, "trainer", total_steps=4), resume=True)

    assert lines_of(resumed)[3][names.SFT_LOSS] == lines_of(whole)[3][names.SFT_LOSS]
    expected = weights_of(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(resumed).items())


def test_supervised_steps_without_files_are_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"sft\.every is set but sft\.files is empty"):
        train(changed(config, "sft", files=[]))
