"""Conversion of a trajectory to a stored row, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agent_loop.chat.sources import describe_source, without_pixels
from agent_loop.errors import DataError
from agent_loop.files.plain_values import without_halves
from agent_loop.runtime.user_values import finite, plain_value
from agent_loop.storage.times import times_of
from agent_loop.trajectory import (
    AgentLoopOutput,
    FailureKind,
    Segment,
    Span,
    Trace,
    Trajectory,
)
from agent_loop.trajectory.codec import from_dict, to_dict
from agent_loop.types import FloatArray, Message, Origin, Row, as_token_ids

MAX_ARRAY = 4096
"""Arrays with more numbers are replaced by a description."""
MAX_TEXT = 2000
"""Maximum characters of the `str` of an object of an unknown type."""


def to_json(value: Any) -> str:
    """Return any value as JSON.

    Arrays become lists, other types become a description, and numbers that are not finite become null.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain, separators=(",", ":"))
    except BaseException:  # noqa: BLE001  (columns of rows may be objects, whose methods are foreign code)
        plain = finite(plain_value(value))
        text = json.dumps(plain, ensure_ascii=False, default=_plain, separators=(",", ":"))
    return without_halves(text)


def described(messages: Iterable[Message]) -> list[Message]:
    """Return the messages with descriptions in place of their images. Parts without an image stay the same."""
    return [_described_message(message) for message in messages]


def described_row(row: Row) -> dict[str, Any]:
    """Return the columns of a row with descriptions in place of the images of its prompt."""
    columns = dict(row)
    if isinstance(columns.get("raw_prompt"), list):
        columns["raw_prompt"] = described(columns["raw_prompt"])
    return columns


def _described_message(message: Message) -> Message:
    try:
        return without_pixels(message)
    except DataError:
        return message


def _plain(value: Any) -> Any:
    if isinstance(value, (Mapping, set, frozenset)):
        return plain_value(value)
    if isinstance(value, np.generic):
        return cast(Any, value).item()
    if isinstance(value, np.ndarray) and cast(Any, value).size <= MAX_ARRAY:
        return finite(cast(Any, value).tolist())
    if isinstance(value, (np.ndarray, bytes)) or hasattr(value, "size"):
        return describe_source(value)
    return str(value)[:MAX_TEXT]


OUTPUT_COLUMNS = ("messages", "tool_schemas", "metrics", "feedback", "incidents", "extra_fields")
"""Columns whose JSON is a field of the output, as `to_dict` returns it."""


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """Values per response token that training computed for one trajectory."""

    advantages: FloatArray | None = None
    """Shape [response_tokens]; None if the trajectory was not trained on."""
    train_logprobs: FloatArray | None = None
    """Shape [response_tokens]: the trainer's log-probs before the update; None if it computed none."""
    trained_mask: NDArray[np.bool_] | None = None
    """Shape [response_tokens]; None is the response mask. Tokens that branches share are trained on once."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Values that all rows of a file share."""

    step: int
    split: str
    weight_version: int | None
    success_threshold: float


def columns_of(trajectory: Trajectory, *, facts: StepFacts, learned: Learned | None = None) -> dict[str, Any]:
    """Return the value of each column of `storage.schema`."""
    learned = learned or Learned()
    return {
        **_who(trajectory, facts),
        **_result(trajectory, facts),
        **_compared(trajectory.output, facts, learned),
        **_time(trajectory),
        **_tokens(trajectory.output, learned),
        **_texts(trajectory),
    }


def _who(trajectory: Trajectory, facts: StepFacts) -> dict[str, Any]:
    agent_name = trajectory.row.get("agent_name")
    return {
        "step": facts.step,
        "split": facts.split,
        "trajectory_id": trajectory.trajectory_id,
        "group": trajectory.group,
        "rollout": trajectory.rollout,
        "branch": trajectory.branch,
        "agent_name": None if agent_name is None else str(agent_name),
        "row": to_json(described_row(trajectory.row)),
        "weight_version": facts.weight_version,
    }


def _result(trajectory: Trajectory, facts: StepFacts) -> dict[str, Any]:
    output, reward = trajectory.output, trajectory.reward
    failed = [f for f in output.feedback if f.origin is Origin.TOOL and f.incident is not None]
    return {
        "reward": reward,
        "reward_score": output.reward_score,
        "is_success": reward is not None and reward >= facts.success_threshold,
        "stop_reason": str(output.stop_reason),
        "failure": output.failure and without_halves(output.failure.error),
        "failure_traceback": output.failure and without_halves(output.failure.traceback),
        "failure_kind": output.failure and str(output.failure.kind),
        "num_turns": output.num_turns,
        "num_assistant_turns": output.num_assistant_turns,
        "num_tool_calls": output.metrics.num_tool_calls,
        "num_failed_calls": len(failed),
        "num_incidents": len(output.incidents),
        "prompt_length": len(output.prompt_ids),
        "response_length": len(output.response_ids),
        "num_model_tokens": output.num_model_tokens,
    }


def _compared(output: AgentLoopOutput, facts: StepFacts, learned: Learned) -> dict[str, Any]:
    """Return the columns that compare the trajectory with the trainer."""
    is_model = output.response_mask.astype(bool)
    is_trained = is_model if learned.trained_mask is None else learned.trained_mask & is_model
    values: dict[str, Any] = {}
    if learned.advantages is not None and is_trained.any():
        values["advantage"] = float(learned.advantages[is_trained].mean())
    if facts.weight_version is not None and is_model.any():
        values["staleness"] = facts.weight_version - int(output.weight_versions[is_model].min())
    if learned.train_logprobs is not None and output.response_logprobs is not None:
        difference = np.abs(learned.train_logprobs - output.response_logprobs)[is_model]
        if difference.size:
            values["logprob_diff_max"] = float(difference.max())
            values["logprob_diff_mean"] = float(difference.mean())
    return values


def _time(trajectory: Trajectory) -> dict[str, Any]:
    trace = trajectory.trace
    if trace is None:
        return {}
    return {"began_at": trace.began_at, "seconds": trace.seconds, **asdict(times_of(trace))}


def _tokens(output: AgentLoopOutput, learned: Learned) -> dict[str, Any]:
    return {
        "prompt_ids": output.prompt_ids,
        "response_ids": output.response_ids,
        "response_mask": output.response_mask,
        "response_logprobs": _logprobs(output),
        "weight_versions": output.weight_versions,
        "advantages": learned.advantages,
        "train_logprobs": learned.train_logprobs,
        "segments": [
            {"origin": str(s.origin), "num_tokens": len(s), "weight_version": s.weight_version}
            for s in output.segments
        ],
        "extras": _extras(output),
    }


def _extras(output: AgentLoopOutput) -> list[dict[str, Any]] | None:
    """Return one entry for each array of each segment; None if there are no arrays."""
    arrays = [
        {
            "segment": number,
            "name": name,
            "dtype": array.dtype.str,
            "shape": array.shape,
            "data": array.tobytes(),
        }
        for number, segment in enumerate(output.segments)
        for name, array in segment.extras.items()
    ]
    return arrays or None


def _logprobs(output: AgentLoopOutput) -> FloatArray | list[float | None] | None:
    """Return log-probs, with None for each token of a model segment that has none, or None if no segment has any."""
    if output.response_logprobs is not None:
        return output.response_logprobs
    by_model = [s for s in output.segments if s.origin is Origin.MODEL]
    if all(s.logprobs is None for s in by_model):
        return None
    values: list[float | None] = []
    for segment in output.response_segments:
        if segment.logprobs is not None:
            values += segment.logprobs.tolist()
        else:
            values += [None if segment.origin is Origin.MODEL else 0.0] * len(segment)
    return values


def _texts(trajectory: Trajectory) -> dict[str, Any]:
    output, trace = trajectory.output, trajectory.trace
    spans = trace and [[s.kind, s.name, s.start, s.end, s.details] for s in trace.spans]
    values = to_dict(output, with_segments=False)
    return {
        **{name: to_json(values[name]) for name in OUTPUT_COLUMNS},
        "messages": to_json(described(output.messages)),
        "answer": without_halves(output.answer),
        "spans": None if spans is None else to_json(spans),
        "reward_extra": to_json(trajectory.reward_extra),
    }


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
    failure = None
    if row["failure"] is not None:
        kind = row.get("failure_kind") or FailureKind.CODE
        failure = {"error": row["failure"], "traceback": row["failure_traceback"] or "", "kind": kind}
    values = {name: json.loads(row[name]) for name in OUTPUT_COLUMNS}
    return from_dict({**row, **values, "failure": failure}, segments=_segments(row))


def _segments(row: Mapping[str, Any]) -> list[Segment]:
    """Split the concatenated tokens into segments."""
    token_ids = np.concatenate([as_token_ids(row["prompt_ids"]), as_token_ids(row["response_ids"])])
    num_prompt = len(row["prompt_ids"])
    extras = _arrays_of_segments(row.get("extras"))
    segments: list[Segment] = []
    start = 0
    for number, run in enumerate(row["segments"]):
        end, origin = start + run["num_tokens"], Origin(run["origin"])
        logprobs = None
        if origin is Origin.MODEL:
            logprobs = _segment_logprobs(row["response_logprobs"], start - num_prompt, end - num_prompt)
        segments.append(
            Segment(
                token_ids[start:end], origin, logprobs, run["weight_version"], extras=extras.get(number, {})
            )
        )
        start = end
    if start != len(token_ids):
        raise ValueError(f"segments of {start} tokens in all, where there are {len(token_ids)}")
    return segments


def _arrays_of_segments(stored: Sequence[Mapping[str, Any]] | None) -> dict[int, dict[str, NDArray[Any]]]:
    """Return the arrays of each segment, by its index and their names. Files of earlier versions have none."""
    extras: dict[int, dict[str, NDArray[Any]]] = {}
    for each in stored or ():
        array = np.frombuffer(each["data"], np.dtype(each["dtype"])).reshape(each["shape"])
        extras.setdefault(each["segment"], {})[each["name"]] = array
    return extras


def _segment_logprobs(stored: Sequence[Any] | FloatArray | None, start: int, end: int) -> FloatArray | None:
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
