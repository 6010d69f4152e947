"""Columns of stored trajectories: one row per trajectory, one file per step.

docs/trajectories.md describes each column. The metadata of a file, under the keys of `METADATA`, holds its schema
version, step and split.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

pa: Any = import_module("pyarrow")
parquet: Any = import_module("pyarrow.parquet")
compute: Any = import_module("pyarrow.compute")


def mask_of_rows(table: Any, **wanted: Any) -> Any:
    """Return a mask of the table's rows whose columns have these values. None matches every value."""
    mask: Any = pa.array([True] * table.num_rows, pa.bool_())
    for name, value in wanted.items():
        if value is not None:
            mask = compute.and_(mask, compute.equal(table[name], value))
    return mask


SCHEMA_VERSION = "1"
"""Version that changes when a column changes its meaning or is removed, but not when columns are added."""
ROWS_PER_GROUP = 64
"""Maximum rows of a row group, which is the unit of reading."""
VOCABULARY_VERSION = 1
VOCABULARY_FILE = "vocabulary.json"


@dataclass(frozen=True, slots=True)
class Metadata:
    """Keys of a file's metadata. All values are text."""

    schema_version: str = "agent_loop.schema_version"
    step: str = "agent_loop.step"
    split: str = "agent_loop.split"
    success_threshold: str = "agent_loop.success_threshold"


METADATA = Metadata()


TEXT, BOOL = pa.string(), pa.bool_()
INT32, FLOAT32, FLOAT64 = pa.int32(), pa.float32(), pa.float64()
INTS, FLOATS = pa.list_(INT32), pa.list_(FLOAT32)
SEGMENTS = pa.list_(pa.struct([("origin", TEXT), ("num_tokens", INT32), ("weight_version", INT32)]))
EXTRAS = pa.list_(
    pa.struct([("segment", INT32), ("name", TEXT), ("dtype", TEXT), ("shape", INTS), ("data", pa.binary())])
)

WHO = {
    "step": INT32,
    "split": TEXT,
    "trajectory_id": TEXT,
    "group": INT32,
    "rollout": INT32,
    "branch": INT32,
    "agent_name": TEXT,
    "row": TEXT,
    "weight_version": INT32,
}
"""Identity of the trajectory."""

RESULT = {
    "reward": FLOAT64,
    "reward_score": FLOAT64,
    "is_success": BOOL,
    "stop_reason": TEXT,
    "failure": TEXT,
    "failure_traceback": TEXT,
    "failure_kind": TEXT,
    "num_turns": INT32,
    "num_assistant_turns": INT32,
    "num_tool_calls": INT32,
    "num_failed_calls": INT32,
    "num_incidents": INT32,
    "prompt_length": INT32,
    "response_length": INT32,
    "num_model_tokens": INT32,
    "advantage": FLOAT32,
    "staleness": INT32,
    "logprob_diff_max": FLOAT32,
    "logprob_diff_mean": FLOAT32,
}
"""Result of the trajectory."""

TIME = {
    "began_at": FLOAT64,
    "seconds": FLOAT32,
    "admission_s": FLOAT32,
    "queue_s": FLOAT32,
    "generate_s": FLOAT32,
    "prefill_s": FLOAT32,
    "tool_s": FLOAT32,
    "interaction_s": FLOAT32,
    "reward_s": FLOAT32,
    "encode_s": FLOAT32,
    "other_s": FLOAT32,
}
"""Seconds, null without a trace. If several activities overlap, the one that began last counts."""

TOKENS = {
    "prompt_ids": INTS,
    "response_ids": INTS,
    "response_mask": pa.list_(pa.int8()),
    "response_logprobs": FLOATS,
    "weight_versions": INTS,
    "advantages": FLOATS,
    "train_logprobs": FLOATS,
    "segments": SEGMENTS,
    "extras": EXTRAS,
}
"""Tokens and values per token."""

TEXTS = {
    "messages": TEXT,
    "tool_schemas": TEXT,
    "answer": TEXT,
    "feedback": TEXT,
    "incidents": TEXT,
    "spans": TEXT,
    "metrics": TEXT,
    "reward_extra": TEXT,
    "extra_fields": TEXT,
}
"""Texts and further values."""

JSON_COLUMNS = frozenset(
    {
        "row",
        "messages",
        "tool_schemas",
        "feedback",
        "incidents",
        "spans",
        "metrics",
        "reward_extra",
        "extra_fields",
    }
)
"""Columns whose text in a Parquet file is JSON."""
GROUPS = {"who": WHO, "result": RESULT, "time": TIME, "tokens": TOKENS, "text": TEXTS}
"""All columns, in the order of the file."""
SCALARS = tuple(name for name in (*WHO, *RESULT, *TIME) if name not in ("row", "failure_traceback"))
"""Columns that can be read quickly for a whole run."""
SCHEMA = pa.schema([column for group in GROUPS.values() for column in group.items()])
