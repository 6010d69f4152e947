"""Columns of stored trajectories: one row per trajectory, one file per step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agent_loop.chat.sources import describe_source, without_pixels
from agent_loop.errors import DataError
from agent_loop.files.plain_values import without_halves
from agent_loop.runtime.user_values import finite, plain_value
from agent_loop.storage.schema import pa
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


@dataclass(frozen=True, eq=False)
class _Subject:
    """A trajectory to store, with the values that several columns are read from."""

    trajectory: Trajectory
    facts: StepFacts
    learned: Learned

    @property
    def agent_name(self) -> str | None:
        name = self.trajectory.row.get("agent_name")
        return None if name is None else str(name)

    @property
    def is_success(self) -> bool:
        reward = self.trajectory.reward
        return reward is not None and reward >= self.facts.success_threshold

    @property
    def output(self) -> AgentLoopOutput:
        return self.trajectory.output

    @cached_property
    def plain(self) -> Mapping[str, Any]:
        return to_dict(self.output, with_segments=False)

    @cached_property
    def times(self) -> Mapping[str, float | None]:
        """Seconds, empty without a trace."""
        trace = self.trajectory.trace
        return {} if trace is None else {"seconds": trace.seconds, **asdict(times_of(trace))}

    @cached_property
    def compared(self) -> Mapping[str, float]:
        """Comparison of the trajectory with the trainer."""
        output, learned, version = self.output, self.learned, self.facts.weight_version
        is_model = output.response_mask.astype(bool)
        is_trained = is_model if learned.trained_mask is None else learned.trained_mask & is_model
        values: dict[str, float] = {}
        if learned.advantages is not None and is_trained.any():
            values["advantage"] = float(learned.advantages[is_trained].mean())
        if version is not None and is_model.any():
            values["staleness"] = version - int(output.weight_versions[is_model].min())
        if learned.train_logprobs is not None and output.response_logprobs is not None and is_model.any():
            difference = np.abs(learned.train_logprobs - output.response_logprobs)[is_model]
            values["logprob_diff_max"] = float(difference.max())
            values["logprob_diff_mean"] = float(difference.mean())
        return values


TEXT, BOOL = pa.string(), pa.bool_()
INT32, FLOAT32, FLOAT64 = pa.int32(), pa.float32(), pa.float64()
INTS, FLOATS = pa.list_(INT32), pa.list_(FLOAT32)
SEGMENTS = pa.list_(pa.struct([("origin", TEXT), ("num_tokens", INT32), ("weight_version", INT32)]))
EXTRAS = pa.list_(
    pa.struct([("segment", INT32), ("name", TEXT), ("dtype", TEXT), ("shape", INTS), ("data", pa.binary())])
)
JSON: Any = "json"
"""Type of columns whose text in a Parquet file is JSON."""

COLUMNS: Mapping[str, tuple[Any, Callable[[_Subject], Any]]] = {
    # identity
    "step": (INT32, lambda of: of.facts.step),
    "split": (TEXT, lambda of: of.facts.split),
    "trajectory_id": (TEXT, lambda of: of.trajectory.trajectory_id),
    "group": (INT32, lambda of: of.trajectory.group),
    "rollout": (INT32, lambda of: of.trajectory.rollout),
    "branch": (INT32, lambda of: of.trajectory.branch),
    "agent_name": (TEXT, lambda of: of.agent_name),
    "row": (JSON, lambda of: described_row(of.trajectory.row)),
    "weight_version": (INT32, lambda of: of.facts.weight_version),
    # result
    "reward": (FLOAT64, lambda of: of.trajectory.reward),
    "reward_score": (FLOAT64, lambda of: of.output.reward_score),
    "is_success": (BOOL, lambda of: of.is_success),
    "stop_reason": (TEXT, lambda of: str(of.output.stop_reason)),
    "failure": (TEXT, lambda of: of.output.failure and without_halves(of.output.failure.error)),
    "failure_traceback": (TEXT, lambda of: of.output.failure and without_halves(of.output.failure.traceback)),
    "failure_kind": (TEXT, lambda of: of.output.failure and str(of.output.failure.kind)),
    "num_turns": (INT32, lambda of: of.output.num_turns),
    "num_assistant_turns": (INT32, lambda of: of.output.num_assistant_turns),
    "num_tool_calls": (INT32, lambda of: of.output.metrics.num_tool_calls),
    "num_failed_calls": (
        INT32,
        lambda of: sum(
            each.origin is Origin.TOOL and each.incident is not None for each in of.output.feedback
        ),
    ),
    "num_incidents": (INT32, lambda of: len(of.output.incidents)),
    "prompt_length": (INT32, lambda of: len(of.output.prompt_ids)),
    "response_length": (INT32, lambda of: len(of.output.response_ids)),
    "num_model_tokens": (INT32, lambda of: of.output.num_model_tokens),
    # comparison with the trainer
    "advantage": (FLOAT32, lambda of: of.compared.get("advantage")),
    "staleness": (INT32, lambda of: of.compared.get("staleness")),
    "logprob_diff_max": (FLOAT32, lambda of: of.compared.get("logprob_diff_max")),
    "logprob_diff_mean": (FLOAT32, lambda of: of.compared.get("logprob_diff_mean")),
    # seconds, null without a trace; if several activities overlap, the one that began last counts
    "began_at": (FLOAT64, lambda of: of.trajectory.trace and of.trajectory.trace.began_at),
    "seconds": (FLOAT32, lambda of: of.times.get("seconds")),
    "admission_s": (FLOAT32, lambda of: of.times.get("admission_s")),
    "queue_s": (FLOAT32, lambda of: of.times.get("queue_s")),
    "generate_s": (FLOAT32, lambda of: of.times.get("generate_s")),
    "prefill_s": (FLOAT32, lambda of: of.times.get("prefill_s")),
    "tool_s": (FLOAT32, lambda of: of.times.get("tool_s")),
    "interaction_s": (FLOAT32, lambda of: of.times.get("interaction_s")),
    "reward_s": (FLOAT32, lambda of: of.times.get("reward_s")),
    "encode_s": (FLOAT32, lambda of: of.times.get("encode_s")),
    "other_s": (FLOAT32, lambda of: of.times.get("other_s")),
    # tokens, and values per token
    "prompt_ids": (INTS, lambda of: of.output.prompt_ids),
    "response_ids": (INTS, lambda of: of.output.response_ids),
    "response_mask": (pa.list_(pa.int8()), lambda of: of.output.response_mask),
    "response_logprobs": (FLOATS, lambda of: _logprobs(of.output)),
    "weight_versions": (INTS, lambda of: of.output.weight_versions),
    "advantages": (FLOATS, lambda of: of.learned.advantages),
    "train_logprobs": (FLOATS, lambda of: of.learned.train_logprobs),
    "segments": (
        SEGMENTS,
        lambda of: [
            {"origin": str(s.origin), "num_tokens": len(s), "weight_version": s.weight_version}
            for s in of.output.segments
        ],
    ),
    "extras": (EXTRAS, lambda of: _extras(of.output)),
    # texts and further values
    "messages": (JSON, lambda of: described(of.output.messages)),
    "tool_schemas": (JSON, lambda of: of.plain["tool_schemas"]),
    "answer": (TEXT, lambda of: without_halves(of.output.answer)),
    "feedback": (JSON, lambda of: of.plain["feedback"]),
    "incidents": (JSON, lambda of: of.plain["incidents"]),
    "spans": (
        JSON,
        lambda of: (
            of.trajectory.trace
            and [[s.kind, s.name, s.start, s.end, s.details] for s in of.trajectory.trace.spans]
        ),
    ),
    "metrics": (JSON, lambda of: of.plain["metrics"]),
    "reward_extra": (JSON, lambda of: of.trajectory.reward_extra),
    "extra_fields": (JSON, lambda of: of.plain["extra_fields"]),
}
"""Type of each column and its value for a trajectory, in the order of the file. docs/trajectories.md describes them."""
JSON_COLUMNS = frozenset(name for name, (kind, _) in COLUMNS.items() if kind is JSON)
"""Columns whose text in a Parquet file is JSON."""
SCHEMA = pa.schema([(name, TEXT if kind is JSON else kind) for name, (kind, _) in COLUMNS.items()])
SCALARS = tuple(
    name
    for name, (kind, _) in COLUMNS.items()
    if kind in (TEXT, BOOL, INT32, FLOAT32, FLOAT64) and name not in ("failure_traceback", "answer")
)
"""Columns that can be read quickly for a whole run."""


def columns_of(trajectory: Trajectory, *, facts: StepFacts, learned: Learned | None = None) -> dict[str, Any]:
    """Return the value of each column, as a Parquet file holds it."""
    of = _Subject(trajectory, facts, learned or Learned())
    values = {name: value(of) for name, (_, value) in COLUMNS.items()}
    return values | {name: to_json(values[name]) for name in JSON_COLUMNS if values[name] is not None}


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


def to_trajectory(row: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory of a row of `StoredRun.trajectory`.

    Images are not stored: messages describe them, and segments have no attachments.

    Raises:
        ValueError: The values of the row contradict each other.
    """
    values = {**row, **{name: json.loads(row[name]) for name in JSON_COLUMNS if row[name] is not None}}
    values["failure"] = None
    if row["failure"] is not None:
        kind = row.get("failure_kind") or FailureKind.CODE
        values["failure"] = {
            "error": row["failure"],
            "traceback": row["failure_traceback"] or "",
            "kind": kind,
        }
    trace = None
    if row["spans"] is not None:
        trace = Trace(row["began_at"], row["seconds"], tuple(Span(*span) for span in values["spans"]))
    return Trajectory(
        output=from_dict(values, segments=_segments(row)),
        row=values["row"],
        group=row["group"],
        rollout=row["rollout"],
        reward=row["reward"],
        reward_extra=values["reward_extra"],
        branch=row["branch"],
        trace=trace,
    )


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
