"""Short trainings of a task of the examples, as `agent-loop train` runs them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from agent_loop.config import load_config
from agent_loop.storage.metrics_file import METRICS_FILE
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from benchmarks.gpu.stage_process import ROOT
from examples.common.demonstrations import Habit
from examples.common.warm_start import make_warm_model
from examples.run import tool_schemas
from examples.two_hop_lookup import task as two_hop_lookup

DEMO = ROOT / "examples" / "two_hop_lookup" / "config.yaml"


def make_demo_model(folder: Path, *, num_steps: int, first_step_share: float) -> None:
    """Create the tiny model of `make demo` and teach it the format, on the CPU.

    Args:
        folder: Where the model is written.
        num_steps: Steps of supervised training.
        first_step_share: Share of the demonstrations that begin with the right call.
    """
    tools = tool_schemas(two_hop_lookup, load_config(DEMO))
    habit = Habit(first_step_share=first_step_share)
    make_warm_model(folder, task=two_hop_lookup, tools=tools, habit=habit, num_steps=num_steps)


def train(
    config: Path, *, model: Path, run_dir: Path, device: torch.device, settings: Sequence[str]
) -> list[dict[str, Any]]:
    """Train a model, and return the metrics of each step.

    Args:
        config: Configuration of the task.
        model: Folder of the model.
        run_dir: Folder of the run.
        device: Device of the model.
        settings: Settings that replace those of the configuration, as `key=value`.
    """
    overrides = [
        f"model.path={model}",
        f"model.device={device.type}",
        f"trainer.run_dir={run_dir}",
        "trainer.save_every=null",
        *settings,
    ]
    loaded = load_config(config, overrides=overrides)
    asyncio.run(PPOTrainer(loaded, console=Console(file=io.StringIO())).fit())
    return list(read_metrics(run_dir / METRICS_FILE))
