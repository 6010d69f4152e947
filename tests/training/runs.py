"""Whole runs in this process, whose rollouts sample from the policy without servers."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from agent_loop.config import Config
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.run import TrainResult
from tests.training.fakes import FakeRollouts


def changed(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def train(
    config: Config, rollouts: Any = None, *, output: io.StringIO | None = None, **options: Any
) -> TrainResult:
    manager = rollouts or FakeRollouts()
    return fit(PPOTrainer(config, manager=manager, console=console_to(output), **options))


def console_to(output: io.StringIO | None = None) -> Console:
    return Console(file=output or io.StringIO(), width=1000)


def fit(trainer: Any) -> TrainResult:
    return asyncio.run(trainer.fit())


def lines_of(result: TrainResult) -> list[dict[str, Any]]:
    """Return the metrics of each step."""
    return list(read_metrics(result.run_dir / "metrics.jsonl"))


def policy_of(result: TrainResult) -> dict[str, Tensor]:
    assert result.checkpoint is not None
    return AutoModelForCausalLM.from_pretrained(result.checkpoint / "model", dtype="float32").state_dict()


def assert_same_policy(first: TrainResult, second: TrainResult) -> None:
    expected = policy_of(first)
    assert all(torch.equal(value, expected[name]) for name, value in policy_of(second).items())
