"""Conversion of a stored row to a trajectory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.trajectory import (
    AgentLoopMetrics,
    AgentLoopOutput,
    Failure,
    FailureKind,
    Feedback,
    Incident,
    Segment,
    Span,
    Trace,
    Trajectory,
)
from agent_loop.trajectory.codec import from_plain
from agent_loop.types import FloatArray, Origin, StopReason, as_token_ids


def to_trajectory(row: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory of a row of `StoredRun.trajectory`.

    Images are not stored: messages describe them, and segments have no attachments.

    Raises:
        ValueError: The values of the row contradict each other.
    """
    return Trajectory(
        output=_output(row),
        row=json.loads(row["row"]),
        group=row["group"],
        rollout=row["rollout"],
        reward=row["reward"],
        reward_extra=json.loads(row["reward_extra"]),
        branch=row["branch"],
        trace=_trace(row),
    )


def _output(row: Mapping[str, Any]) -> AgentLoopOutput:
    return AgentLoopOutput(
        segments=_segments(row),
        stop_reason=StopReason(row["stop_reason"]),
        reward_score=row["reward_score"],
        messages=json.loads(row["messages"]),
        tool_schemas=json.loads(row["tool_schemas"]),
        metrics=from_plain(json.loads(row["metrics"]), AgentLoopMetrics),
        feedback=from_plain(json.loads(row["feedback"]), list[Feedback]),
        incidents=from_plain(json.loads(row["incidents"]), list[Incident]),
        failure=_failure(row),
        extra_fields=json.loads(row["extra_fields"]),
        num_turns=row["num_turns"],
    )


def _failure(row: Mapping[str, Any]) -> Failure | None:
    if row["failure"] is None:
        return None
    kind = FailureKind(row.get("failure_kind") or FailureKind.CODE)
    return Failure(row["failure"], row["failure_traceback"] or "", kind)


def _segments(row: Mapping[str, Any]) -> list[Segment]:
    """Split the concatenated tokens into segments."""
    token_ids = np.concatenate([as_token_ids(row["prompt_ids"]), as_token_ids(row["response_ids"])])
    num_prompt = len(row["prompt_ids"])
    extras = _extras(row.get("extras"))
    segments: list[Segment] = []
    start = 0
    for number, run in enumerate(row["segments"]):
        end, origin = start + run["num_tokens"], Origin(run["origin"])
        logprobs = None
        if origin is Origin.MODEL:
            logprobs = _logprobs(row["response_logprobs"], start - num_prompt, end - num_prompt)
        segments.append(
            Segment(
                token_ids[start:end], origin, logprobs, run["weight_version"], extras=extras.get(number, {})
            )
        )
        start = end
    if start != len(token_ids):
        raise ValueError(f"segments of {start} tokens in all, where there are {len(token_ids)}")
    return segments


def _extras(stored: Sequence[Mapping[str, Any]] | None) -> dict[int, dict[str, NDArray[Any]]]:
    """Return the arrays of each segment, by its index and their names. Files of earlier versions have none."""
    extras: dict[int, dict[str, NDArray[Any]]] = {}
    for each in stored or ():
        array = np.frombuffer(each["data"], np.dtype(each["dtype"])).reshape(each["shape"])
        extras.setdefault(each["segment"], {})[each["name"]] = array
    return extras


def _logprobs(stored: Sequence[Any] | FloatArray | None, start: int, end: int) -> FloatArray | None:
    """Return the log-probs of a segment; None if it has none. NaN stands for null."""
    if stored is None:
        return None
    part = np.asarray(stored[start:end], np.float32)
    return None if len(part) and np.isnan(part).all() else part


def _trace(row: Mapping[str, Any]) -> Trace | None:
    if row["spans"] is None:
        return None
    spans = tuple(
        Span(kind, name, start, end, details) for kind, name, start, end, details in json.loads(row["spans"])
    )
    return Trace(row["began_at"], row["seconds"], spans)
