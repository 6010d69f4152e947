"""Trainings of examples: identical when repeated or interrupted, in folders and containers, and from a teacher."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from agent_loop.config import load_config
from agent_loop.runtime.owner import this_process
from agent_loop.storage.metrics_file import METRICS_FILE
from agent_loop.training.checkpoint import latest_checkpoint
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.workspaces.container.container import OWNER_LABEL
from agent_loop.workspaces.container.pool import close_pools
from agent_loop.workspaces.folder import root_folder
from examples import learn_from_teacher, run
from examples.common.warm_start import make_warm_model
from examples.run import RECIPES, tool_schemas
from examples.two_hop_lookup.task import reward
from tests.examples.conftest import WITHOUT_CONTAINER, load_task

NAME = "two_hop_lookup"
STEPS, ROWS, SAMPLES = 3, 6, 4
TIME_METRICS = ("time/", "timing", "perf/", "agent_loop/")
"""Prefixes of metrics that depend on durations."""
SAMPLED = "response_ids response_logprobs train_logprobs advantages reward stop_reason row"


class Interruption:
    """State of the reward function that interrupts a run."""

    num_scored = 0
    at: frozenset[int] = frozenset()
    """Numbers of the rewards at which the function sends Ctrl-C."""


async def interrupting_reward(output: Any, row: Any) -> float:
    Interruption.num_scored += 1
    if Interruption.num_scored in Interruption.at:
        os.kill(os.getpid(), signal.SIGINT)
    return await reward(output, row)


@pytest.fixture(scope="module")
def two_hop_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the demo's model after a short warm start, so that its tool calls are sometimes wrong."""
    path = tmp_path_factory.mktemp("model")
    make_warm(path, NAME, num_steps=250)
    return path


def train_twice(
    run_dir: Path, two_hop_model: Path, *, interrupted_at: int | None = None, **settings: Any
) -> str:
    """Train, and return the console output. With `interrupted_at`, send Ctrl-C after that many rewards, and resume."""
    overrides = {
        "model.path": two_hop_model,
        "trainer.run_dir": run_dir,
        "trainer.total_steps": STEPS,
        "trainer.save_every": STEPS,
        "trainer.val_every": 2,
        "data.val_max_rows": 3,
        "data.train_batch_size": ROWS,
        "rollout.n": SAMPLES,
        "rollout.deterministic": "true",
        "reward.function": f"{__name__}:interrupting_reward",
        **settings,
    }
    config = load_config(
        f"examples/{NAME}/config.yaml", overrides=[f"{key}={value}" for key, value in overrides.items()]
    )
    console_output = io.StringIO()
    Interruption.num_scored = 0
    Interruption.at = frozenset() if interrupted_at is None else frozenset({interrupted_at})
    console = Console(file=console_output, width=200)
    result = asyncio.run(PPOTrainer(config, console=console).fit())
    if interrupted_at is not None:
        assert result.is_interrupted
        result = asyncio.run(PPOTrainer(config, resume=True, console=console).fit())
    assert not result.is_interrupted
    return console_output.getvalue()


def outcome(run_dir: Path) -> dict[str, Any]:
    """Return the weights, optimizer states, trajectories and metrics of a run, without durations."""
    checkpoint = latest_checkpoint(run_dir).path
    files = [checkpoint / "model" / "model.safetensors", *sorted(checkpoint.glob("trainer/*.distcp"))]
    found: dict[str, Any] = {file.name: file.read_bytes() for file in files}
    for file in sorted((run_dir / "trajectories").glob("*.parquet")):
        found[file.name] = [
            {name: row[name] for name in SAMPLED.split()} for row in pq.read_table(file).to_pylist()
        ]
    found["metrics"] = [
        {name: value for name, value in line.items() if not name.startswith(TIME_METRICS)}
        for line in read_metrics(run_dir / METRICS_FILE)
    ]
    return found


@pytest.fixture(scope="module")
def first(two_hop_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the outcome of an uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("first") / "run"
    train_twice(run_dir, two_hop_model)
    found = outcome(run_dir)
    assert len(found) == 2 + STEPS + 2 + 1, sorted(found)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "settings",
    [
        {"rollout.num_servers": 2, "rollout.agent.num_workers": 2, "rollout.max_concurrent": 3},
        {"rollout.engine": "embedded_process"},
    ],
    ids=["two_servers_and_workers", "engine_in_a_process"],
)
def test_a_second_run_is_identical_with_other_numbers_of_servers_and_processes(
    first: dict[str, Any], two_hop_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    train_twice(tmp_path / "run", two_hop_model, **settings)
    assert_equal(outcome(tmp_path / "run"), first)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("interrupted_at", [5, ROWS * SAMPLES + 10])
def test_an_interrupted_and_resumed_run_is_identical(
    first: dict[str, Any], two_hop_model: Path, tmp_path: Path, interrupted_at: int
) -> None:
    console_output = train_twice(tmp_path / "run", two_hop_model, interrupted_at=interrupted_at)
    assert "rollouts are in the journal" in console_output
    assert_equal(outcome(tmp_path / "run"), first)


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that two outcomes are equal. The assertion shows the names of differing parts, not their values."""
    assert [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)] == []


CONFIG = "examples/shell_agent/config.yaml"
IN_CONTAINERS = (
    "data.workspace.container.build_args.BASE_IMAGE=localhost/agent-loop-busybox",
    "data.workspace.container.build_options=[--network=none]",
    "data.workspace.container.pool=4",
)


@pytest.fixture(scope="module")
def shell_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model after a short warm start."""
    path = tmp_path_factory.mktemp("model")
    make_warm(path, "shell_agent", num_steps=400)
    return path


def make_warm(path: Path, name: str, *, num_steps: int) -> None:
    """Write the model of an example after a short warm start, so that its tool calls are sometimes wrong."""
    task = load_task(name)
    tools = tool_schemas(task, load_config(f"examples/{name}/config.yaml"))
    habit = RECIPES[name].habit
    make_warm_model(path, task=task, tools=tools, habit=habit, num_steps=num_steps, num_conversations=500)


def train(run_dir: Path, shell_model: Path, *overrides: str, num_steps: int) -> list[dict[str, Any]]:
    """Train, and return the metrics of each step."""
    settings = [
        f"model.path={shell_model}",
        f"trainer.run_dir={run_dir}",
        f"trainer.total_steps={num_steps}",
        f"trainer.save_every={num_steps}",
        *overrides,
    ]
    trainer = PPOTrainer(load_config(CONFIG, overrides=settings), console=Console(file=io.StringIO()))
    asyncio.run(trainer.fit())
    return [dict(line) for line in read_metrics(run_dir / METRICS_FILE)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_shell_agent_in_folders_learns_in_a_few_steps(shell_model: Path, tmp_path: Path) -> None:
    metrics = train(tmp_path / "run", shell_model, *WITHOUT_CONTAINER, num_steps=6)
    success = [line["reward/mean"] for line in metrics]
    assert success[0] < 0.5
    assert max(success[-2:]) > success[0] + 0.2
    assert not list(root_folder().glob(f"{this_process().token}*"))


@pytest.mark.containers
@pytest.mark.timeout(600)
def test_a_shell_agent_in_containers_is_trained_and_leaves_no_container(
    shell_model: Path, tmp_path: Path
) -> None:
    small = ("data.train_batch_size=3", "rollout.n=4")
    metrics = train(tmp_path / "run", shell_model, *IN_CONTAINERS, *small, num_steps=2)
    close_pools()
    assert len(metrics) == 2
    assert any(0 < line["reward/mean"] < 1 for line in metrics)
    assert all(line["tools/shell/failed_share"] == 0.0 for line in metrics)
    assert any(line.get("actor/grad_norm", 0) > 0 for line in metrics)
    filters = f"label={OWNER_LABEL}={this_process().token}"
    left = subprocess.run(["podman", "ps", "-a", "-q", "--filter", filters], capture_output=True, text=True)
    assert (left.returncode, left.stdout) == (0, "")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    run.main(["two_hop_lookup", "--out", str(path), "--steps", "2", "--skip-report"])
    return path


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("sft", ["GRPO alone stopped: steps 1 to 10 had nothing to", "step 3/3 loss", "NOT passed"]),
        ("distillation", ["before: success 0.", "step 10/10 reward", "NOT passed: success went from 0."]),
    ],
)
def test_a_student_fails_alone_and_then_learns_from_a_teacher(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, parts: list[str]
) -> None:
    code = learn_from_teacher.main(
        [how, "--teacher", str(teacher), "--out", str(tmp_path), "--sft-steps", "3", "--steps", "10"]
    )

    shown = " ".join(capsys.readouterr().out.split())
    assert code == learn_from_teacher.EXIT_NOT_PASSED
    assert [part for part in parts if part not in shown] == []
