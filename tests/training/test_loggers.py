"""Metrics in TensorBoard, MLflow and Weights & Biases, read back with their own readers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import Config, RolloutConfig, TraceConfig, TrainerConfig
from agent_loop.errors import ConfigError
from agent_loop.runtime.background_writer import BackgroundWriter
from agent_loop.training.loggers import Scalars, make_loggers
from agent_loop.training.metrics import MetricsWriter, read_metrics

STEPS = [{"reward/mean": 0.25, "val/pass@2": 0.5}, {"reward/mean": 0.75, "reward/kl": math.nan}]


def write_steps(run_dir: Path, *, logger: list[Any], uri: str | None = None) -> None:
    config = Config(
        trainer=TrainerConfig(
            run_dir=str(run_dir), logger=logger, project_name="tea", experiment_name="green"
        ),
        rollout=RolloutConfig(trace=TraceConfig(tracking_uri=uri)),
    )
    run_dir.mkdir(exist_ok=True)
    with MetricsWriter(run_dir / "metrics.jsonl", loggers=make_loggers(config)) as writer:
        for step, metrics in enumerate(STEPS, start=1):
            writer.write(step, metrics)
    assert [line["step"] for line in read_metrics(run_dir / "metrics.jsonl")] == [1, 2]


@pytest.mark.filterwarnings("default")
def test_tensorboard_has_every_metric_at_its_step(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_steps(tmp_path, logger=["console", "tensorboard"])
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]} == {
        "reward/mean": [(1, 0.25), (2, 0.75)],
        "val/pass@2": [(1, 0.5)],
    }


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")
def test_mlflow_has_a_run_with_the_settings_and_every_metric(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    write_steps(tmp_path, logger=["mlflow"], uri=uri)
    client = mlflow.MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("tea").experiment_id])
    assert (run.info.run_name, run.info.status) == ("green", "FINISHED")
    assert run.data.params["rollout.n"] == "1"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.75)]
    assert run.data.metrics["val/pass_2"] == 0.5
    assert "reward/kl" not in run.data.metrics


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")
def test_wandb_keeps_a_run_that_can_be_synced_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_steps(tmp_path, logger=["wandb"])
    wandb.teardown()  # The background process of wandb writes the file, at the latest when it ends.
    [kept] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    data = kept.read_bytes()
    assert b"reward/mean" in data
    assert b"tea" in data


def test_a_failing_logger_does_not_affect_other_loggers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        max_batch = 1

        def open(self) -> None:
            raise ConnectionError("nobody is there")

        def write(self, items: Iterable[Scalars], /) -> None: ...

        def close(self) -> None: ...

    logger = BackgroundWriter[Scalars](Broken(), name="metrics to broken", max_queued=10)
    with (
        caplog.at_level(logging.WARNING),
        MetricsWriter(tmp_path / "metrics.jsonl", loggers=[logger]) as writer,
    ):
        writer.write(1, {"reward/mean": 1.0})
    assert [line["reward/mean"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1.0]
    assert "metrics to broken: 1 in total were not written" in caplog.text


def test_a_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match=r'needs wandb: pip install "agent-loop\[wandb\]"'):
        make_loggers(Config(trainer=TrainerConfig(logger=["wandb"])))
