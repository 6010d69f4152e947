"""Tests that train the shell agent for a few steps, in folders and in containers."""

from __future__ import annotations

import asyncio
import io
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from agent_loop.config import load_config
from agent_loop.runtime.owner import this_process
from agent_loop.storage.metrics_file import METRICS_FILE
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.workspaces.container.container import OWNER_LABEL
from agent_loop.workspaces.container.pool import close_pools
from agent_loop.workspaces.folder import root_folder
from examples.common.demonstrations import Task
from examples.common.warm_start import make_warm_model
from examples.run import RECIPES, tool_schemas
from examples.shell_agent import task
from tests.examples.conftest import WITHOUT_CONTAINER

pytestmark = pytest.mark.timeout(600)

CONFIG = "examples/shell_agent/config.yaml"
IN_CONTAINERS = (
    "data.workspace.container.build_args.BASE_IMAGE=localhost/agent-loop-busybox",
    "data.workspace.container.build_options=[--network=none]",
    "data.workspace.container.pool=4",
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model after a short warm start."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("model")
    tools = tool_schemas(cast(Task, task), load_config(CONFIG))
    habit = RECIPES["shell_agent"].habit
    make_warm_model(
        path, task=cast(Task, task), tools=tools, habit=habit, num_steps=400, num_conversations=500
    )
    return path


def train(run_dir: Path, model_path: Path, *overrides: str, num_steps: int) -> list[dict[str, Any]]:
    """Train, and return the metrics of each step."""
    settings = [
        f"model.path={model_path}",
        f"trainer.run_dir={run_dir}",
        f"trainer.total_steps={num_steps}",
        f"trainer.save_every={num_steps}",
        *overrides,
    ]
    trainer = PPOTrainer(load_config(CONFIG, overrides=settings), console=Console(file=io.StringIO()))
    asyncio.run(trainer.fit())
    return [dict(line) for line in read_metrics(run_dir / METRICS_FILE)]


@pytest.mark.slow
def test_a_shell_agent_in_folders_learns_in_a_few_steps(model_path: Path, tmp_path: Path) -> None:
    metrics = train(tmp_path / "run", model_path, *WITHOUT_CONTAINER, num_steps=6)
    success = [line["reward/mean"] for line in metrics]
    assert success[0] < 0.5
    assert max(success[-2:]) > success[0] + 0.2
    assert not list(root_folder().glob(f"{this_process().token}*"))


@pytest.mark.containers
def test_a_shell_agent_in_containers_is_trained_and_leaves_no_container(
    model_path: Path, tmp_path: Path
) -> None:
    small = ("data.train_batch_size=3", "rollout.n=4")
    metrics = train(tmp_path / "run", model_path, *IN_CONTAINERS, *small, num_steps=2)
    close_pools()
    assert len(metrics) == 2
    assert any(0 < line["reward/mean"] < 1 for line in metrics)
    assert all(line["tools/shell/failed_share"] == 0.0 for line in metrics)
    assert any(line.get("actor/grad_norm", 0) > 0 for line in metrics)
    filters = f"label={OWNER_LABEL}={this_process().token}"
    left = subprocess.run(["podman", "ps", "-a", "-q", "--filter", filters], capture_output=True, text=True)
    assert (left.returncode, left.stdout) == (0, "")
