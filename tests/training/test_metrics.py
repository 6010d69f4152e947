"""Metrics of a step, and a metrics file that can be read after a crash."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from agent_loop.errors import OutputError
from agent_loop.training.metrics import MetricsWriter, forget_steps_after, read_metrics
from agent_loop.training.step_metrics import rollout_metrics
from agent_loop.trajectory import (
    AgentLoopMetrics,
    AgentLoopOutput,
    Incident,
    IncidentKind,
    Segment,
    Trajectory,
)
from agent_loop.types import Origin, StopReason, as_token_ids


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


def test_a_rollout_is_measured_in_tokens_turns_rewards_and_staleness() -> None:
    def trajectory(
        reward: float | None, version: int, reason: StopReason, num_model_tokens: int
    ) -> Trajectory:
        segments = [
            Segment(as_token_ids([1, 2]), Origin.PROMPT),
            Segment(as_token_ids([3] * num_model_tokens), Origin.MODEL, weight_version=version),
            Segment(as_token_ids([4]), Origin.TOOL),
        ]
        return Trajectory(
            output=AgentLoopOutput(segments=segments, stop_reason=reason),
            row={},
            group=0,
            rollout=0,
            reward=reward,
            reward_extra={},
        )

    metrics = rollout_metrics(
        [
            trajectory(1.0, 5, StopReason.ANSWERED, 3),
            trajectory(0.0, 3, StopReason.ANSWERED, 1),
            trajectory(None, 5, StopReason.FAILED, 1),
            trajectory(0.5, 5, StopReason.ANSWERED, 1),
        ],
        success_threshold=1.0,
        weight_version=5,
    )

    assert metrics["reward/mean"] == 0.5
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["reward/success_share"] == 0.25
    assert metrics["rollout/unscored_share"] == 0.25
    assert metrics["rollout/model_tokens"] == 6
    assert metrics["rollout/response_length/mean"] == 2.5
    assert metrics["rollout/num_turns/mean"] == 3
    assert metrics["rollout/staleness/max"] == 2
    assert metrics["rollout/stop_reason/failed"] == 0.25
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
    outputs = [
        output([malformed, malformed, invalid], num_tool_calls=1, num_turns=2),
        output([malformed], num_tool_calls=4, num_turns=3),
    ]
    trajectories = [
        Trajectory(o, row={}, group=0, rollout=n, reward=0.0, reward_extra={}) for n, o in enumerate(outputs)
    ]

    metrics = rollout_metrics(trajectories, success_threshold=1.0, weight_version=0)

    assert metrics["rollout/malformed_call_share"] == 3 / 8
    assert metrics["rollout/invalid_turn_share"] == 1 / 5


def test_a_full_disk_ends_the_run_with_an_error_that_names_the_metrics() -> None:
    with (
        pytest.raises(OutputError, match="the metrics '/dev/full' cannot be written"),
        MetricsWriter(Path("/dev/full")) as writer,
    ):
        writer.write(1, {"loss": 0.5})
