"""With `rollout.deterministic`, a training is the same to the last bit, however often it is run or interrupted."""

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
from agent_loop.training.checkpoint import latest_checkpoint
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.run_folder import METRICS_FILE
from examples.common.demonstrations import Task, demonstrations
from examples.common.model import make_model
from examples.common.tokenizer import pad_id, train_tokenizer
from examples.common.warm_start import encode, warm_start
from examples.run import RECIPES, tool_schemas
from examples.two_hop_lookup.task import reward

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAME = "two_hop_lookup"
STEPS, ROWS, SAMPLES = 3, 6, 4
OF_TIME = ("time/", "timing", "perf/", "agent_loop/")
"""Beginnings of the names of metrics that tell how long something took, or what took long."""
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
    """Sends Ctrl-C while the rewards of a run are given: at once for some, never for the others."""

    num_scored = 0
    at: frozenset[int] = frozenset()


async def interrupting_reward(output: Any, row: Any) -> float:
    Interruption.num_scored += 1
    if Interruption.num_scored in Interruption.at:
        os.kill(os.getpid(), signal.SIGINT)
    return await reward(output, row)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model after a short warm start: it calls tools, not always well."""
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
    """Train, with a Ctrl-C after so many rewards and a resume after that; return what was said."""
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
    said = io.StringIO()
    Interruption.num_scored = 0
    Interruption.at = frozenset() if interrupted_at is None else frozenset({interrupted_at})
    result = asyncio.run(PPOTrainer(config, console=Console(file=said, width=200)).fit())
    if interrupted_at is not None:
        assert result.is_interrupted
        result = asyncio.run(PPOTrainer(config, resume=True, console=Console(file=said, width=200)).fit())
    assert not result.is_interrupted
    return said.getvalue()


def outcome(run_dir: Path) -> dict[str, Any]:
    """Everything that a run left, but times."""
    checkpoint = latest_checkpoint(run_dir).path
    files = [checkpoint / "model" / "model.safetensors", *sorted(checkpoint.glob("trainer/*.distcp"))]
    found: dict[str, Any] = {file.name: file.read_bytes() for file in files}
    for file in sorted((run_dir / "trajectories").glob("*.parquet")):
        found[file.name] = [{name: row[name] for name in SAMPLED} for row in pq.read_table(file).to_pylist()]
    found["metrics"] = [without_times(line) for line in read_metrics(run_dir / METRICS_FILE)]
    return found


def without_times(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not name.startswith(OF_TIME)}


@pytest.fixture(scope="module")
def first(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an uninterrupted run left."""
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
def test_a_second_run_is_equal_whoever_computes_it(
    first: dict[str, Any], model_path: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    train(tmp_path / "run", model_path, **settings)
    assert_equal(outcome(tmp_path / "run"), first)


@pytest.mark.parametrize("interrupted_at", [5, ROWS * SAMPLES + 10])
def test_a_run_that_was_interrupted_and_resumed_is_equal(
    first: dict[str, Any], model_path: Path, tmp_path: Path, interrupted_at: int
) -> None:
    said = train(tmp_path / "run", model_path, interrupted_at=interrupted_at)
    assert "rollouts are in the journal" in said
    assert_equal(outcome(tmp_path / "run"), first)


def test_an_evaluation_that_was_interrupted_is_lost_and_nothing_else_differs(
    first: dict[str, Any], model_path: Path, tmp_path: Path
) -> None:
    train(tmp_path / "run", model_path, interrupted_at=2 * ROWS * SAMPLES + 5)
    found, wanted = outcome(tmp_path / "run"), dict(first)
    del wanted["val-000002.parquet"]
    wanted["metrics"] = [dict(line) for line in first["metrics"]]
    wanted["metrics"][1] = {k: v for k, v in wanted["metrics"][1].items() if not k.startswith("val/")}
    assert len(wanted["metrics"][1]) < len(first["metrics"][1])
    assert_equal(found, wanted)


def test_another_seed_gives_another_run(first: dict[str, Any], model_path: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", model_path, **{"rollout.seed": 1})
    other = outcome(tmp_path / "run")
    assert other["model.safetensors"] != first["model.safetensors"]


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Name what differs, instead of showing it."""
    assert [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)] == []
