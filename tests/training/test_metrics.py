"""Metrics of a step, where they are written and shown, and a metrics file that can be read after a crash."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent_loop.config import Config, RolloutConfig, TraceConfig, TrainerConfig
from agent_loop.errors import ConfigError, OutputError
from agent_loop.runtime.background_writer import BackgroundWriter
from agent_loop.training import metrics as names
from agent_loop.training.loggers import Scalars, make_loggers
from agent_loop.training.metrics import MetricsWriter, forget_steps_after, read_metrics
from agent_loop.training.progress import Progress
from agent_loop.training.step_metrics import rollout_metrics
from agent_loop.training.timing import time_shares
from agent_loop.trajectory import (
    AgentLoopMetrics,
    AgentLoopOutput,
    Incident,
    IncidentKind,
    Segment,
    Span,
    Trace,
    Trajectory,
)
from agent_loop.types import Origin, StopReason, as_token_ids


def trajectory(group: int, output: AgentLoopOutput, reward: float | None = 0.0, **facts: Any) -> Trajectory:
    return Trajectory(output, {}, group, 0, reward, {}, **facts)


def test_a_rollout_is_measured_in_tokens_turns_rewards_and_staleness() -> None:
    def ended(reason: StopReason, *, version: int, num_model_tokens: int) -> AgentLoopOutput:
        segments = [
            Segment(as_token_ids([1, 2]), Origin.PROMPT),
            Segment(as_token_ids([3] * num_model_tokens), Origin.MODEL, weight_version=version),
            Segment(as_token_ids([4]), Origin.TOOL),
        ]
        return AgentLoopOutput(segments=segments, stop_reason=reason)

    metrics = rollout_metrics(
        [
            trajectory(0, ended(StopReason.ANSWERED, version=5, num_model_tokens=3), 1.0),
            trajectory(0, ended(StopReason.ANSWERED, version=3, num_model_tokens=1), 0.0),
            trajectory(0, ended(StopReason.FAILED, version=5, num_model_tokens=1), None),
            trajectory(0, ended(StopReason.ANSWERED, version=5, num_model_tokens=1), 0.5),
        ],
        success_threshold=1.0,
        weight_version=5,
    )

    expected = {
        "reward/mean": 0.5,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/success_share": 0.25,
        "rollout/unscored_share": 0.25,
        "rollout/model_tokens": 6,
        "rollout/response_length/mean": 2.5,
        "rollout/num_turns/mean": 3,
        "rollout/staleness/max": 2,
        "rollout/stop_reason/failed": 0.25,
    }
    assert {name: metrics[name] for name in expected} == expected
    assert rollout_metrics([], success_threshold=1.0, weight_version=0) == {}


def test_malformed_calls_and_invalid_turns_are_shares_of_all_calls_and_turns() -> None:
    def output(kinds: list[IncidentKind], *, num_tool_calls: int, num_turns: int) -> AgentLoopOutput:
        sampled = Segment(as_token_ids([3]), Origin.MODEL, weight_version=0)
        reply = Segment(as_token_ids([4]), Origin.TOOL)
        return AgentLoopOutput(
            segments=[sampled, reply] * num_turns,
            incidents=[Incident(kind, "") for kind in kinds],
            metrics=AgentLoopMetrics(num_tool_calls=num_tool_calls),
        )

    malformed, invalid = IncidentKind.MALFORMED_CALL, IncidentKind.INVALID_TURN
    trajectories = [
        trajectory(0, output([malformed, malformed, invalid], num_tool_calls=1, num_turns=2)),
        trajectory(1, output([malformed], num_tool_calls=4, num_turns=3)),
    ]

    metrics = rollout_metrics(trajectories, success_threshold=1.0, weight_version=0)

    assert metrics["rollout/malformed_call_share"] == 3 / 8
    assert metrics["rollout/invalid_turn_share"] == 1 / 5


def test_the_time_of_the_rollout_is_divided_as_its_trajectories_spent_it() -> None:
    fast = (
        Span("queue", "", 0.0, 1.0),
        Span("generate", "server-0", 1.0, 3.0, {"prefill_s": 0.5}),
        Span("reward", "", 3.0, 4.0),
    )
    slow = (Span("generate", "server-0", 0.0, 3.0), Span("tool", "search", 3.0, 9.0))
    traces = [Trace(100.0, 4.0, fast), Trace(100.0, 10.0, slow)]
    output = AgentLoopOutput(segments=())

    found, text = time_shares(
        [trajectory(group, output, trace=trace) for group, trace in enumerate(traces)],
        phases={"rollout": 10.0, "update": 5.0, "publish": 1.0, "validate": 2.0, "step": 20.0},
        label="step=3",
    )

    assert found.pop(names.SLOWEST_SECONDS) == 10.0
    assert found == pytest.approx(
        {
            names.TIME_QUEUE: 1 / 40,
            names.TIME_PREFILL: 0.5 / 40,
            names.TIME_DECODE: 4.5 / 40,
            names.TIME_TOOLS: 6 / 40,
            names.TIME_REWARD: 1 / 40,
            names.TIME_OTHER: 1 / 40,
            names.TIME_TRAINING: 5 / 20,
            names.TIME_WEIGHTS: 1 / 20,
            names.TIME_VALIDATION: 2 / 20,
            names.TIME_IDLE: 6 / 40 + 2 / 20,
        }
    )
    assert sum(found.values()) == pytest.approx(1)
    assert text.startswith("time: training 25%  idle 25%  tools 15%  decode 11%")
    assert text.endswith("slowest step=3/group=1/rollout=0 10.0 s (tool 6.0 s)")


def test_each_step_is_one_line_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {"a": 0.5, "b": math.nan, "c": math.inf})
        assert list(read_metrics(path)) == [{"step": 1, "a": 0.5, "b": None, "c": None}]
    with MetricsWriter(path) as writer:
        writer.write(2, {"a": 1.0})
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_a_resumed_run_removes_later_steps_and_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "rew')
    forget_steps_after(path, step=2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    forget_steps_after(tmp_path / "missing.jsonl", step=2)


def test_a_full_disk_ends_the_run_with_an_error_that_names_the_metrics() -> None:
    with (
        pytest.raises(OutputError, match="the metrics '/dev/full' cannot be written"),
        MetricsWriter(Path("/dev/full")) as writer,
    ):
        writer.write(1, {"loss": 0.5})


def write_steps(run_dir: Path, *, logger: list[Any], uri: str | None = None) -> None:
    trainer = TrainerConfig(run_dir=str(run_dir), logger=logger, project_name="tea", experiment_name="green")
    config = Config(trainer=trainer, rollout=RolloutConfig(trace=TraceConfig(tracking_uri=uri)))
    with MetricsWriter(run_dir / "metrics.jsonl", loggers=make_loggers(config)) as writer:
        writer.write(1, {"reward/mean": 0.25, "val/pass@2": 0.5})
        writer.write(2, {"reward/mean": 0.75, "reward/kl": math.nan})


@pytest.mark.filterwarnings("default")
def test_tensorboard_has_every_metric_at_its_step(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_steps(tmp_path, logger=["console", "tensorboard"])
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {"reward/mean": [(1, 0.25), (2, 0.75)], "val/pass@2": [(1, 0.5)]}


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

    path = tmp_path / "metrics.jsonl"
    logger = BackgroundWriter[Scalars](Broken(), name="metrics to broken", max_queued=10)
    with caplog.at_level(logging.WARNING), MetricsWriter(path, loggers=[logger]) as writer:
        writer.write(1, {"reward/mean": 1.0})
    assert [line["reward/mean"] for line in read_metrics(path)] == [1.0]
    assert "metrics to broken: 1 in total were not written" in caplog.text


def test_a_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match=r'needs wandb: pip install "agent-loop\[wandb\]"'):
        make_loggers(Config(trainer=TrainerConfig(logger=["wandb"])))


METRICS = {
    names.REWARD_MEAN: 0.4123,
    names.SUCCESS_SHARE: 0.25,
    names.NUM_TURNS_MEAN: 4.0,
    names.RESPONSE_LENGTH_MEAN: 88.4,
    names.TOKENS_PER_SECOND: 812.3,
}


def test_outside_a_terminal_each_step_is_one_plain_line() -> None:
    output = io.StringIO()
    with Progress(total_steps=4, console=Console(file=output, width=40)) as progress:
        progress.start(completed_steps=0)
        progress.end_step(1, METRICS)
        progress.end_step(2, {**METRICS, f"{names.VALIDATION}{names.SUCCESS_SHARE}": 0.9})
    first, second = output.getvalue().splitlines()
    assert first == "step 1/4  reward 0.412  success 25.0%  turns 4.0  response 88  tokens/s 812  eta 0:00:00"
    assert "val success 90.0%" in second


def test_in_a_terminal_live_bars_count_steps_and_trajectories_below_the_lines() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    with Progress(total_steps=4, console=console) as progress:
        progress.start(completed_steps=0)
        with progress.rollout(num_trajectories=8) as note:
            note(object())
            progress.end_step(1, METRICS, time_spent="time: decode 100%")
            progress.say("a line that stays")
    for part in ("step 1/4", "0/8", "reward 0.412", "decode 100%", "a line that stays"):
        assert part in output.getvalue()
