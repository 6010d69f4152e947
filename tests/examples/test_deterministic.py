"""Tests that a training with `rollout.deterministic` is bit-identical when it is repeated or interrupted."""

from __future__ import annotations

import asyncio
import importlib
import io
import os
import random
import signal
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from agent_loop.config import load_config
from agent_loop.storage.metrics_file import METRICS_FILE
from agent_loop.tiny_models.model import make_model
from agent_loop.tiny_models.tokenizer import pad_id, train_tokenizer
from agent_loop.training.checkpoint import latest_checkpoint
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from examples.common.demonstrations import Task, demonstrations
from examples.common.warm_start import encode, warm_start
from examples.run import RECIPES, tool_schemas
from examples.two_hop_lookup.task import reward

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAME = "two_hop_lookup"
STEPS, ROWS, SAMPLES = 3, 6, 4
TIME_METRICS = ("time/", "timing", "perf/", "agent_loop/")
"""Prefixes of metrics that depend on durations."""
SAMPLED = (
    "response_ids",
    "response_logprobs",
    "train_logprobs",
    "advantages",
    "reward",
    "stop_reason",
    "row",
)


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
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the demo's model after a short warm start, so that its tool calls are sometimes wrong."""
    path = tmp_path_factory.mktemp("model")
    task = cast(Task, importlib.import_module(f"examples.{NAME}.task"))
    tools = tool_schemas(task, load_config(f"examples/{NAME}/config.yaml"))
    conversations = demonstrations(task, rng=random.Random(0), habit=RECIPES[NAME].habit)
    tokenizer = train_tokenizer(islice(conversations, 500), tools=tools)
    model = make_model(tokenizer, seed=0)
    examples = encode(conversations, tokenizer=tokenizer, tools=tools)
    for _ in warm_start(model, examples=examples, pad_id=pad_id(tokenizer), num_steps=250):
        pass
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def train(run_dir: Path, model_path: Path, *, interrupted_at: int | None = None, **settings: Any) -> str:
    """Train, and return the console output. With `interrupted_at`, send Ctrl-C after that many rewards, and resume."""
    overrides = {
        "model.path": model_path,
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
    result = asyncio.run(PPOTrainer(config, console=Console(file=console_output, width=200)).fit())
    if interrupted_at is not None:
        assert result.is_interrupted
        result = asyncio.run(
            PPOTrainer(config, resume=True, console=Console(file=console_output, width=200)).fit()
        )
    assert not result.is_interrupted
    return console_output.getvalue()


def outcome(run_dir: Path) -> dict[str, Any]:
    """Return the weights, optimizer states, trajectories and metrics of a run, without durations."""
    checkpoint = latest_checkpoint(run_dir).path
    files = [checkpoint / "model" / "model.safetensors", *sorted(checkpoint.glob("trainer/*.distcp"))]
    found: dict[str, Any] = {file.name: file.read_bytes() for file in files}
    for file in sorted((run_dir / "trajectories").glob("*.parquet")):
        found[file.name] = [{name: row[name] for name in SAMPLED} for row in pq.read_table(file).to_pylist()]
    found["metrics"] = [without_times(line) for line in read_metrics(run_dir / METRICS_FILE)]
    return found


def without_times(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not name.startswith(TIME_METRICS)}


@pytest.fixture(scope="module")
def first(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the outcome of an uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("first") / "run"
    train(run_dir, model_path)
    found = outcome(run_dir)
    assert len(found) == 2 + STEPS + 2 + 1, sorted(found)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout.num_servers": 2, "rollout.agent.num_workers": 2, "rollout.max_concurrent": 3},
        {"rollout.engine": "embedded_process"},
    ],
    ids=["two_servers_and_workers", "engine_in_a_process"],
)
def test_a_second_run_is_identical_with_other_numbers_of_servers_and_processes(
    first: dict[str, Any], model_path: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    train(tmp_path / "run", model_path, **settings)
    assert_equal(outcome(tmp_path / "run"), first)


@pytest.mark.parametrize("interrupted_at", [5, ROWS * SAMPLES + 10])
def test_an_interrupted_and_resumed_run_is_identical(
    first: dict[str, Any], model_path: Path, tmp_path: Path, interrupted_at: int
) -> None:
    console_output = train(tmp_path / "run", model_path, interrupted_at=interrupted_at)
    assert "rollouts are in the journal" in console_output
    assert_equal(outcome(tmp_path / "run"), first)


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that two outcomes are equal. The assertion shows the names of differing parts, not their values."""
    assert [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)] == []
