"""Columns of stored trajectories: one row per trajectory, one file per step.

The metadata of a file, under the keys of `METADATA`, holds its schema version, step and split.
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


@dataclass(frozen=True, slots=True)
class Column:
    """Column of the schema."""

    name: str
    type: Any
    """Type of Arrow."""
    about: str
    """Description in Markdown."""


TEXT, BOOL = pa.string(), pa.bool_()
INT32, FLOAT32, FLOAT64 = pa.int32(), pa.float32(), pa.float64()
INTS, FLOATS = pa.list_(INT32), pa.list_(FLOAT32)
SEGMENTS = pa.list_(pa.struct([("origin", TEXT), ("num_tokens", INT32), ("weight_version", INT32)]))
EXTRAS = pa.list_(
    pa.struct([("segment", INT32), ("name", TEXT), ("dtype", TEXT), ("shape", INTS), ("data", pa.binary())])
)

WHO = (
    Column("step", INT32, "Training step; 0 outside of training and before the first step."),
    Column("split", TEXT, "`train`, `val`, `eval` or `rollout`."),
    Column("trajectory_id", TEXT, "`group=3/rollout=1`, with `/branch=0` where the loop returned several."),
    Column("group", INT32, "Index of the prompt in the batch."),
    Column("rollout", INT32, "Index of the sample in the group."),
    Column("branch", INT32, "Index of the output if the loop returned a list of outputs; else null."),
    Column("agent_name", TEXT, "The row's agent loop; null if the row names none."),
    Column("row", TEXT, "JSON: the row's other columns, `raw_prompt` included, images described."),
    Column("weight_version", INT32, "The trainer's when the step began; null outside of training."),
)
"""Identity of the trajectory."""

RESULT = (
    Column("reward", FLOAT64, "Null if the trajectory failed, was cancelled or has no score."),
    Column("reward_score", FLOAT64, "Reward from the loop or its tools; null if they gave none."),
    Column("is_success", BOOL, "The reward is at least `reward.success_threshold`."),
    Column("stop_reason", TEXT, "Why the trajectory ended; a `StopReason`."),
    Column(
        "failure", TEXT, "Type and message of the error that ended the trajectory; null if there was none."
    ),
    Column("failure_traceback", TEXT, "Traceback of the error."),
    Column("failure_kind", TEXT, "What failed: `code`, or the part of the infrastructure; a `FailureKind`."),
    Column("num_turns", INT32, "Prompt, assistant turns and replies, each counted once."),
    Column(
        "num_assistant_turns",
        INT32,
        "Number of completions. A completion that spans a weight swap counts once.",
    ),
    Column("num_tool_calls", INT32, "Tool calls that could be parsed."),
    Column(
        "num_failed_calls",
        INT32,
        "Tool calls that failed, timed out, or did not fit the schema.",
    ),
    Column("num_incidents", INT32, "Number of entries in `incidents`."),
    Column("prompt_length", INT32, "Number of tokens."),
    Column("response_length", INT32, "Number of tokens of the model and of replies."),
    Column("num_model_tokens", INT32, "Number of tokens that the model sampled."),
    Column("advantage", FLOAT32, "Mean over the trained tokens; null if the trajectory was not trained on."),
    Column("staleness", INT32, "Steps between the oldest weights that sampled a token and `weight_version`."),
    Column("logprob_diff_max", FLOAT32, "Largest |`train_logprobs` - `response_logprobs`| of a model token."),
    Column(
        "logprob_diff_mean", FLOAT32, "Mean |`train_logprobs` - `response_logprobs`| of the model tokens."
    ),
)
"""Result of the trajectory."""

TIME = (
    Column("began_at", FLOAT64, "Time of the request, in seconds since 1970."),
    Column(
        "seconds",
        FLOAT32,
        "From `began_at` until the trajectory was scored; the nine columns after it sum to this.",
    ),
    Column("admission_s", FLOAT32, "Held back by `rollout.max_concurrent`."),
    Column("queue_s", FLOAT32, "Queued for a server."),
    Column("generate_s", FLOAT32, "Waiting for completions."),
    Column(
        "prefill_s", FLOAT32, "Part of `generate_s` before each first token; null if no server reports it."
    ),
    Column("tool_s", FLOAT32, "In tools."),
    Column("interaction_s", FLOAT32, "In the interaction."),
    Column("reward_s", FLOAT32, "Being scored."),
    Column("encode_s", FLOAT32, "Reading images and other media before encoding."),
    Column("other_s", FLOAT32, "The rest: closing tools, the journal, the loop's own code."),
)
"""Seconds, null without a trace. If several activities overlap, the one that began last counts."""

TOKENS = (
    Column("prompt_ids", INTS, "The prompt."),
    Column("response_ids", INTS, "All tokens after the prompt."),
    Column(
        "response_mask",
        pa.list_(pa.int8()),
        "Per response token: 1 = sampled by the model, but not forced by a grammar.",
    ),
    Column(
        "response_logprobs",
        FLOATS,
        "Per response token, from the server; 0 where the mask is 0, null in a segment without log-probs. Null as "
        "a whole if no segment has any.",
    ),
    Column("weight_versions", INTS, "Per response token: version that sampled it; -1 where the mask is 0."),
    Column("advantages", FLOATS, "Per response token; null as a whole if the trajectory was not trained on."),
    Column(
        "train_logprobs",
        FLOATS,
        "Per response token: the trainer's log-probs before the update, 0 at other tokens; null if it computed none.",
    ),
    Column("segments", SEGMENTS, "Runs of tokens with one origin (`Origin`) and version, the prompt first."),
    Column(
        "extras",
        EXTRAS,
        "More values per token from the server: of each array its index in `segments`, name, numpy dtype, shape "
        "`[num_tokens, ...]` and bytes in C order; null if there are none.",
    ),
)
"""Tokens and values per token."""

TEXTS = (
    Column("messages", TEXT, "JSON: OpenAI messages, images described."),
    Column("tool_schemas", TEXT, "JSON: the OpenAI function schemas in the model's prompt."),
    Column("answer", TEXT, "The text of the last assistant message."),
    Column("feedback", TEXT, "JSON: a list of `{origin, name, place, reward, incident, extra}`."),
    Column("incidents", TEXT, "JSON: a list of `{kind, detail, assistant_turn}`."),
    Column("spans", TEXT, "JSON: a list of `[kind, name, start, end, details]`; null without a trace."),
    Column("metrics", TEXT, "JSON: the `AgentLoopMetrics`."),
    Column("reward_extra", TEXT, "JSON: further values that the reward function returned."),
    Column("extra_fields", TEXT, "JSON: further values of the loop."),
)
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
SCALARS = tuple(
    column.name for column in (*WHO, *RESULT, *TIME) if column.name not in ("row", "failure_traceback")
)
"""Columns that can be read quickly for a whole run."""
SCHEMA = pa.schema([(column.name, column.type) for group in GROUPS.values() for column in group])


def markdown() -> str:
    """Return the columns as tables for the documentation."""
    lines: list[str] = []
    for group, columns in GROUPS.items():
        lines += [f"### {group}", "", "| column | type | |", "|---|---|---|"]
        lines += [f"| `{column.name}` | `{column.type}` | {column.about} |" for column in columns]
        lines.append("")
    return "\n".join(lines)
