"""Training whose servers and workers are actors of a cluster."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from agent_loop.config import load_config
from agent_loop.errors import ProcessGroupError
from agent_loop.runtime.concurrency import run_together
from agent_loop.storage.metrics_file import METRICS_FILE
from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from tests.cli.project import make_project

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


REWARD = """
def reward(output, row):
    return sum(output.response_ids) % 7 / 7
"""


def make_trainer(folder: Path, *overrides: str) -> PPOTrainer:
    path = make_project(folder)
    (folder / "task.py").write_text(REWARD)
    config = load_config(
        path,
        overrides=[
            "trainer.runtime=ray",
            "trainer.ray.num_cpus_per_server=0.01",
            "trainer.ray.num_cpus_per_worker=0.01",
            "trainer.ray.num_cpus_per_learner=0.01",
            "rollout.engine_kwargs.num_threads=1",
            *overrides,
        ],
    )
    return PPOTrainer(config, console=Console(file=io.StringIO()))


def metrics_of(folder: Path, name: str) -> list[float]:
    return [line[name] for line in read_metrics(folder / "run" / METRICS_FILE)]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_training_run_on_a_cluster_reaches_its_last_step(
    max_staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(
        tmp_path,
        "rollout.num_servers=2",
        "rollout.agent.num_workers=2",
        "trainer.total_steps=4",
        f"trainer.mode={'async' if max_staleness else 'sync'}",
        f"trainer.max_staleness={max_staleness or 1}",
    )
    result = asyncio.run(trainer.fit())
    assert (result.step, result.is_interrupted) == (4, False)
    staleness = metrics_of(tmp_path, names.STALENESS_MAX)
    assert len(staleness) == 4
    assert max(staleness) <= max_staleness


def test_processes_of_the_cluster_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(tmp_path, "rollout.n=4", "trainer.num_processes=2", "trainer.total_steps=3")
    result = asyncio.run(trainer.fit())
    assert (result.step, result.is_interrupted) == (3, False)
    assert all(norm > 0 for norm in metrics_of(tmp_path, names.GRAD_NORM))
    # The servers sample with the weights that are trained.
    assert max(metrics_of(tmp_path, names.LOGPROB_DIFF_MAX)) < 1e-4


def test_a_training_process_that_is_killed_ends_the_run_with_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(tmp_path, "rollout.n=4", "trainer.num_processes=2", "trainer.total_steps=100000")

    async def kill_rank_1() -> None:
        metrics = tmp_path / "run" / METRICS_FILE
        while not (metrics.exists() and len(metrics_of(tmp_path, "step")) >= 2):  # noqa: ASYNC110  (a file)
            await asyncio.sleep(0.1)
        os.kill(rank_1(), signal.SIGKILL)

    async def main() -> None:
        await run_together([fit(), kill_rank_1()])

    async def fit() -> None:
        await trainer.fit()

    with pytest.raises(ProcessGroupError, match="of the 2 processes that train together, process 1 ended"):
        asyncio.run(main())


def rank_1() -> int:
    """Return the process id of the actor of rank 1."""
    (pid,) = (
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"ray::RankActor" in path.read_bytes()
    )
    return pid
