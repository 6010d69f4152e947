"""Sample trajectories of every kind that is stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from agent_loop.trajectory import (
    AgentLoopMetrics,
    AgentLoopOutput,
    Failure,
    Feedback,
    Incident,
    IncidentKind,
    Segment,
    Span,
    Trace,
    Trajectory,
)
from agent_loop.types import Origin, StopReason, as_token_ids


def model(ids: list[int], *, version: int = 3, logprobs: list[float] | None = None) -> Segment:
    values = None if logprobs is None else np.array(logprobs, np.float32)
    return Segment(as_token_ids(ids), Origin.MODEL, values, version)


def tool(ids: list[int]) -> Segment:
    return Segment(as_token_ids(ids), Origin.TOOL)


def prompt(ids: list[int]) -> Segment:
    return Segment(as_token_ids(ids), Origin.PROMPT)


def solved(*, group: int = 0, rollout: int = 0, reward: float = 0.1, **more: Any) -> Trajectory:
    """Return a trajectory of two turns with a tool between them. The second turn spans a weight swap."""
    output = AgentLoopOutput(
        segments=[
            prompt([1, 2, 3]),
            model([4, 5], logprobs=[-0.1, -0.2]),
            tool([6, 7, 8]),
            model([9], logprobs=[-0.3]),
            model([10], version=4, logprobs=[-0.4]),
        ],
        stop_reason=StopReason.ANSWERED,
        reward_score=0.1,
        messages=[
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]},
            {"role": "tool", "content": "vier ☃"},
            {"role": "assistant", "content": "4"},
        ],
        tool_schemas=[{"type": "function", "function": {"name": "add"}}],
        metrics=AgentLoopMetrics(generate_sequences=1.5, num_tool_calls=1, num_preempted=2),
        feedback=[Feedback(Origin.TOOL, "add", 1, 0.5, None, {"seen": [1, 2]})],
        incidents=[Incident(IncidentKind.CUT_TURN, "length after 2 tokens", 1)],
        extra_fields={"tries": 2},
    )
    spans = (
        Span("admission", "", 0.0, 1.0),
        Span("generate", "server-0", 1.0, 3.0, {"num_prompt_tokens": 3, "prefill_s": 0.5}),
        Span("tool", "add", 3.0, 3.5, {"place": 1, "number": 0}),
        Span("generate", "server-0", 3.5, 5.0, {"num_prompt_tokens": 8, "prefill_s": 0.25}),
    )
    row = {"raw_prompt": [{"role": "user", "content": "2 + 2?"}], "answer": 4, "agent_name": "tool_agent"}
    return Trajectory(
        output=output,
        row=row,
        group=group,
        rollout=rollout,
        reward=reward,
        reward_extra={"why": "right"},
        trace=Trace(1_700_000_000.25, 6.0, spans),
        **more,
    )


def failed(*, group: int = 0, rollout: int = 1) -> Trajectory:
    """Return a trajectory that failed before its first token."""
    output = AgentLoopOutput(
        segments=[],
        stop_reason=StopReason.FAILED,
        failure=Failure("ValueError: half a surrogate \ud83d", "Traceback ..."),
    )
    row = {"raw_prompt": [{"role": "user", "content": "\ud83d"}], "weight": float("nan")}
    return Trajectory(output=output, row=row, group=group, rollout=rollout, reward=None, reward_extra={})


def without_logprobs(*, group: int = 1, rollout: int = 0, some: bool = False) -> Trajectory:
    """Return a trajectory without log-probs, or with log-probs for some segments only."""
    segments = [prompt([1]), model([2, 3], logprobs=[-0.5, -0.6] if some else None), tool([4]), model([5])]
    output = AgentLoopOutput(segments=segments, stop_reason=StopReason.RESPONSE_LENGTH)
    row = {"raw_prompt": [{"role": "user", "content": "hello"}]}
    return Trajectory(
        output=output, row=row, group=group, rollout=rollout, reward=1.0, reward_extra={}, branch=1
    )
