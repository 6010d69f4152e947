"""Metrics of a step, where they are written and shown, and warnings of steps without a signal and of collapses."""

from __future__ import annotations

import asyncio
import io
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from agent_loop.config import Config, RolloutConfig, TraceConfig, TrainerConfig
from agent_loop.errors import ConfigError, OutputError, TrainingError
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.runtime.background_writer import BackgroundWriter
from agent_loop.training import metrics as names
from agent_loop.training.checkpoint import latest_checkpoint, list_checkpoints
from agent_loop.training.loggers import Scalars, make_loggers
from agent_loop.training.metrics import MetricsWriter, forget_steps_after, read_metrics
from agent_loop.training.monitor import CUT_SHARE, Monitor, refuse_without_reward, why_dead
from agent_loop.training.progress import Progress
from agent_loop.training.step_metrics import rollout_metrics
from agent_loop.training.timing import time_shares
from agent_loop.trajectory import (
    AgentLoopMetrics,
    AgentLoopOutput,
    Failure,
    Incident,
    IncidentKind,
    Segment,
    Span,
    Trace,
    Trajectory,
)
from agent_loop.types import Origin, StopReason, as_token_ids
from tests.training.fakes import FakeRollouts
from tests.training.runs import changed, train


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
    from tensorboard.backend.event_processing import event_accumulator  # late: only this test needs it

    write_steps(tmp_path, logger=["console", "tensorboard"])
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
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


def test_a_failing_logger_affects_no_other_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


@register("scores_itself")
class ScoresItself(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("sections", "can_learn"),
    [
        ({"reward": {"function": "task.py:reward"}}, True),
        ({"rollout": {"multi_turn": {"tools": ["task.py:tool"]}}}, True),
        ({"rollout": {"multi_turn": {"interaction_config_path": "user.yaml"}}}, True),
        ({"rollout": {"agent": {"default_agent_loop": "scores_itself"}}}, True),
        ({"rollout": {"agent": {"default_agent_loop": "agent_program"}}}, True),
        ({"rollout": {"agent": {"loop_files": ["loops.py"]}}}, True),
        ({"rollout": {"agent": {"default_agent_loop": "single_turn_agent"}}}, False),
        ({"rollout": {"agent": {"default_agent_loop": "tool_agent"}}}, False),
        ({"rollout": {"agent": {"default_agent_loop": "partial_tool_agent"}}}, False),
    ],
)
def test_a_run_without_any_source_of_reward_is_refused(sections: dict[str, Any], can_learn: bool) -> None:
    config = Config.model_validate(sections)
    if can_learn:
        refuse_without_reward(config, [{}])
    else:
        with pytest.raises(ConfigError, match="nothing gives a reward, so nothing can be learned; set"):
            refuse_without_reward(config, [{}])


def unscored(trajectory: Trajectory, step: int) -> Trajectory:
    return structs.replace(trajectory, reward=None)


def empty(trajectory: Trajectory, reason: StopReason, reward: float | None) -> Trajectory:
    return structs.replace(trajectory, output=AgentLoopOutput(segments=(), stop_reason=reason), reward=reward)


def too_long(trajectory: Trajectory, step: int) -> Trajectory:
    """Return the trajectory with an empty answer, which a reward function scored with 0."""
    return empty(trajectory, StopReason.PROMPT_LENGTH, 0.0)


def half_too_long(trajectory: Trajectory, step: int) -> Trajectory:
    return too_long(trajectory, step) if trajectory.rollout % 2 else unscored(trajectory, step)


def cancelled(trajectory: Trajectory, step: int) -> Trajectory:
    return empty(trajectory, StopReason.CANCELLED, None)


def failed(trajectory: Trajectory, step: int) -> Trajectory:
    output = trajectory.output.failed(Failure(error="Boom: no disk", traceback=""))
    return structs.replace(trajectory, output=output, reward=None)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (unscored, "none of the 16 trajectories with sampled tokens, of 16, was scored (16 answered); set"),
        (too_long, "the prompts of all 16 trajectories are over rollout.prompt_length; raise it"),
        (failed, "all 16 trajectories failed, 16 of them with Boom: no disk; fix that first"),
        (
            half_too_long,
            "of the 8 trajectories with sampled tokens, of 16, was scored (8 answered, 8 prompt_",
        ),
        (cancelled, "no token was sampled in any of 16 trajectories (16 cancelled); check the prompts"),
    ],
)
def test_a_first_step_without_a_signal_stops_the_run_with_the_reason(
    config: Config, edit: Callable[[Trajectory, int], Trajectory], message: str
) -> None:
    rollouts = FakeRollouts(edit=edit)
    with pytest.raises(TrainingError) as error:
        train(config, rollouts)
    assert "step 1 has nothing to learn from: " in str(error.value)
    assert message in str(error.value)
    assert rollouts.weight_version == 0
    assert list_checkpoints(Path(config.trainer.run_dir)) == []


def run(config: Config, dead_steps: Sequence[int], **trainer: Any) -> str:
    """Train with rewards that are all 0 in some steps, and return what the console showed."""

    def reward(trajectory: Trajectory, step: int) -> Trajectory:
        return structs.replace(
            trajectory, reward=0.0 if step in dead_steps else float(trajectory.rollout % 2)
        )

    output = io.StringIO()
    train(changed(config, "trainer", **trainer), FakeRollouts(edit=reward), output=output)
    return output.getvalue()


def test_the_first_dead_step_of_a_row_of_them_is_reported_once_and_they_are_counted(config: Config) -> None:
    shown = run(config, [2, 3, 5], total_steps=5)
    assert [line.split(":")[0] for line in shown.splitlines() if "nothing to learn" in line] == [
        "step 2 has nothing to learn from",
        "step 5 has nothing to learn from",
    ]
    lines = read_metrics(Path(config.trainer.run_dir) / "metrics.jsonl")
    assert [line[names.DEAD_STEPS] for line in lines] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_too_many_dead_steps_in_a_row_save_and_stop_the_run(config: Config, mode: str) -> None:
    with pytest.raises(
        TrainingError,
        match=r"^steps 2 to 4 had nothing .*; step 4: all 16 rewards are 0, .*max_dead_steps is 3",
    ):
        run(config, range(2, 9), total_steps=8, max_dead_steps=3, save_every=8, mode=mode, max_staleness=0)
    assert latest_checkpoint(Path(config.trainer.run_dir)).step == 4


ALIVE = {
    names.SIGNAL_SHARE: 0.5,
    names.SUCCESS_SHARE: 0.5,
    names.ADVANTAGE_MEAN: 0.0,
    names.ADVANTAGE_STD: 1.0,
    names.ROWS_TRAINED: 8.0,
    names.OPTIMIZER_STEPS: 2.0,
    names.NONFINITE_UPDATES: 0.0,
}
"""Metrics of a step that had a signal."""


def sampled(num_rows: int) -> list[Trajectory]:
    """Return groups of four trajectories with equal rewards, which differ between groups."""
    rollouts = FakeRollouts(edit=lambda t, step: structs.replace(t, reward=float(t.group)))
    rows = [{"raw_prompt": [{"role": "user", "content": "2 3"}]}] * num_rows
    return asyncio.run(rollouts.run(rows, n=4))


@pytest.mark.parametrize(
    ("num_rows", "metrics", "reason"),
    [
        (4, {names.SIGNAL_SHARE: 0.0}, "in each of the 4 groups, all rewards are equal or only one"),
        (1, {names.SIGNAL_SHARE: 0.0}, "all 4 rewards are 0, so no trajectory is better than another; use"),
        (1, {names.SIGNAL_SHARE: 0.0, names.SUCCESS_SHARE: 1.0}, "all 4 rewards are 0, .*may be solved"),
        (4, {names.ADVANTAGE_STD: 0.0}, "in each of the 4 groups"),
        (4, {names.ROWS_TRAINED: 0.0}, r"no trajectory with a signal may be trained \(16 answered\); change"),
        (4, {names.MASKED_SHARE: 1.0}, "actor.correction masks every token"),
        (4, {names.OPTIMIZER_STEPS: 0.0, names.NONFINITE_UPDATES: 2.0}, "no gradient was finite; lower"),
    ],
)
def test_a_step_that_no_update_can_use_is_dead(num_rows: int, metrics: dict[str, float], reason: str) -> None:
    with pytest.raises(TrainingError, match=f"step 1: {reason}"):
        monitor_of(1, sampled(num_rows), ALIVE | metrics)


def monitor_of(max_dead_steps: int, trajectories: Sequence[Trajectory], metrics: dict[str, float]) -> None:
    """Raise the error of a run with this step alone."""
    monitor = Monitor(max_dead_steps=max_dead_steps, report=lambda _: None)
    monitor.add(trajectories, metrics, step=1)
    error = monitor.error(step=1)
    if error is not None:
        raise error


def test_a_step_with_a_signal_and_a_step_of_the_critic_alone_are_not_dead() -> None:
    of_critic = {key: value for key, value in ALIVE.items() if not key.startswith(names.ACTOR)}
    for metrics in (ALIVE, of_critic, ALIVE | {names.SIGNAL_SHARE: 0.0, names.SFT_TOKENS: 5.0}):
        assert why_dead(sampled(1), metrics) is None


HEALTHY = {
    names.ENTROPY: 0.5,
    names.RESPONSE_LENGTH_MEAN: 100.0,
    names.SIGNAL_SHARE: 0.5,
    names.LOGPROB_DIFF_MEAN: 0.01,
    names.NONFINITE_UPDATES: 0.0,
    names.CRITIC_NONFINITE_UPDATES: 0.0,
}


def warnings_of(values: Sequence[float], *, metric: str) -> list[str]:
    """Return the warnings of a run whose other metrics are healthy."""
    shown: list[str] = []
    watch = Monitor(max_dead_steps=None, report=shown.append)
    for step, value in enumerate(values, start=1):
        watch.check({**HEALTHY, metric: value}, step=step)
    return shown


@pytest.mark.parametrize(
    ("metric", "good", "bad"),
    [
        (names.ENTROPY, [0.5] * 5, [0.04] * 3),
        (names.RESPONSE_LENGTH_MEAN, [100] * 5, [210] * 3),
        (CUT_SHARE, [0.2] * 5, [0.6] * 3),
        (names.SIGNAL_SHARE, [0.5] * 5, [0.02, 0.0, 0.04]),
        (names.LOGPROB_DIFF_MEAN, [0.01] * 5, [0.2] * 3),
    ],
)
def test_a_collapse_is_reported_once_until_recovery(metric: str, good: list[float], bad: list[float]) -> None:
    assert len(warnings_of([*good, *bad, *bad, *bad], metric=metric)) == 1
    assert len(warnings_of([*good, *bad, *good, *bad], metric=metric)) == 2
    assert warnings_of(good * 5, metric=metric) == []


def test_one_unusual_step_gives_no_warning() -> None:
    assert warnings_of([0.5] * 6 + [0.001] + [0.5] * 3, metric=names.ENTROPY) == []
    assert warnings_of([0.5] * 6 + [0.01, 0.01] + [0.5] * 3, metric=names.SIGNAL_SHARE) == []
