"""Shares of the time of a step."""

from __future__ import annotations

import pytest

from agent_loop.training import metrics as names
from agent_loop.training.timing import time_shares
from agent_loop.trajectory import AgentLoopOutput, Span, Trace, Trajectory


def trajectory(
    group: int, *, seconds: float, spans: tuple[Span, ...] = (), watched: bool = True
) -> Trajectory:
    return Trajectory(
        output=AgentLoopOutput(segments=()),
        row={},
        group=group,
        rollout=0,
        reward=0.0,
        reward_extra={},
        trace=Trace(100.0, seconds, spans) if watched else None,
    )


def test_the_time_of_the_rollout_is_divided_as_its_trajectories_spent_it() -> None:
    fast = trajectory(
        0,
        seconds=4.0,
        spans=(
            Span("queue", "", 0.0, 1.0),
            Span("generate", "server-0", 1.0, 3.0, {"prefill_s": 0.5}),
            Span("reward", "", 3.0, 4.0),
        ),
    )
    slow = trajectory(
        1, seconds=10.0, spans=(Span("generate", "server-0", 0.0, 3.0), Span("tool", "search", 3.0, 9.0))
    )
    found, text = time_shares(
        [fast, slow],
        phases={"rollout": 10.0, "update": 5.0, "publish": 1.0, "validate": 2.0, "step": 20.0},
        label="step=3",
    )
    expected = {
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
    assert found.pop(names.SLOWEST_SECONDS) == 10.0
    assert found == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(1)
    assert text.startswith("time: training 25%  idle 25%  tools 15%  decode 11%")
    assert text.endswith("slowest step=3/group=1/rollout=0 10.0 s (tool 6.0 s)")
