"""The columns of stored trajectories: one row per trajectory, one file per step.

A file also says in its own metadata, by `METADATA`, of which schema, step and split it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent_loop.storage.arrow import pa

SCHEMA_VERSION = "1"
"""Changes when a column changes its meaning or goes away; columns that are added change nothing."""
ROWS_PER_GROUP = 64
"""Rows of a row group at most: one trajectory is read with no more than its neighbours."""
VOCABULARY_VERSION = 1
VOCABULARY_FILE = "vocabulary.json"


@dataclass(frozen=True, slots=True)
class Metadata:
    """The keys of a file's own metadata; all values are text."""

    schema_version: str = "agent_loop.schema_version"
    step: str = "agent_loop.step"
    split: str = "agent_loop.split"
    success_threshold: str = "agent_loop.success_threshold"


METADATA = Metadata()


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    name: str
    type: Any
    """Arrow's."""
    about: str
    """What it holds, in Markdown."""


TEXT, BOOL = pa.string(), pa.bool_()
INT32, FLOAT32, FLOAT64 = pa.int32(), pa.float32(), pa.float64()
INTS, FLOATS = pa.list_(INT32), pa.list_(FLOAT32)
SEGMENTS = pa.list_(pa.struct([("origin", TEXT), ("num_tokens", INT32), ("weight_version", INT32)]))
EXTRAS = pa.list_(
    pa.struct([("segment", INT32), ("name", TEXT), ("dtype", TEXT), ("shape", INTS), ("data", pa.binary())])
)

WHO = (
    Column("step", INT32, "Of the training it belongs to; 0 outside of training and before the first step."),
    Column("split", TEXT, "`train`, `val`, `eval` or `rollout`."),
    Column("trajectory_id", TEXT, "`group=3/rollout=1`, with `/branch=0` where the loop returned several."),
    Column("group", INT32, "Which prompt of the batch."),
    Column("rollout", INT32, "Which of the group's samples."),
    Column("branch", INT32, "Which output, where the loop returned a list of them; else null."),
    Column("agent_name", TEXT, "The row's agent loop; null where it names none."),
    Column("row", TEXT, "JSON: the row's other columns, `raw_prompt` included, images described."),
    Column("weight_version", INT32, "The trainer's when the step began; null outside of training."),
)
"""Which trajectory it is."""

RESULT = (
    Column("reward", FLOAT64, "Null where it failed, was cancelled, or nothing scores it."),
    Column(
        "reward_score", FLOAT64, "What the loop or its tools gave it themselves; null where they left it."
    ),
    Column("is_success", BOOL, "The reward is at least `reward.success_threshold`."),
    Column("stop_reason", TEXT, "Why it ended; a `StopReason`."),
    Column("failure", TEXT, "The error that ended it, type and message; null where none did."),
    Column("failure_traceback", TEXT, "The same, in full."),
    Column("num_turns", INT32, "Prompt, assistant turns and replies, each counted once."),
    Column("num_assistant_turns", INT32, "A completion that spans a weight swap is one."),
    Column("num_tool_calls", INT32, "Calls that could be read."),
    Column(
        "num_failed_calls",
        INT32,
        "Of these, those that a tool or its schema refused, or that ran out of time.",
    ),
    Column("num_incidents", INT32, "Named losses; see `incidents`."),
    Column("prompt_length", INT32, "Tokens."),
    Column("response_length", INT32, "Tokens: the model's and the replies'."),
    Column("num_model_tokens", INT32, "Tokens that the model said."),
    Column("advantage", FLOAT32, "Mean over its trained tokens; null where it was not trained."),
    Column("staleness", INT32, "Steps between the oldest weights that sampled a token and `weight_version`."),
    Column("logprob_diff_max", FLOAT32, "Largest |`train_logprobs` - `response_logprobs`| of a model token."),
    Column("logprob_diff_mean", FLOAT32, "The same, mean."),
)
"""What came of it."""

TIME = (
    Column("began_at", FLOAT64, "When it was asked for, in seconds since 1970."),
    Column("seconds", FLOAT32, "From there until it was scored; the nine columns after it sum to this."),
    Column("admission_s", FLOAT32, "Held back by `rollout.max_concurrent`."),
    Column("queue_s", FLOAT32, "Waiting for a place at a server."),
    Column("generate_s", FLOAT32, "Waiting for completions."),
    Column(
        "prefill_s", FLOAT32, "The part of `generate_s` before each first token; null where no server said."
    ),
    Column("tool_s", FLOAT32, "In tools."),
    Column("interaction_s", FLOAT32, "In the interaction."),
    Column("reward_s", FLOAT32, "Being scored."),
    Column("encode_s", FLOAT32, "Reading images and the like before tokens are made."),
    Column("other_s", FLOAT32, "The rest: closing tools, the journal, the loop's own code."),
)
"""Seconds, null without a trace. An instant in which several things went on counts for what began last."""

TOKENS = (
    Column("prompt_ids", INTS, "The prompt."),
    Column("response_ids", INTS, "All tokens behind the prompt."),
    Column("response_mask", pa.list_(pa.int8()), "Per response token: 1 = the model said it."),
    Column(
        "response_logprobs",
        FLOATS,
        "Per response token, as the server gave it; 0 where the mask is 0, null in a segment without; null as a "
        "whole where no segment has any.",
    ),
    Column("weight_versions", INTS, "Per response token: what sampled it; -1 where the mask is 0."),
    Column("advantages", FLOATS, "Per response token; null as a whole where it was not trained."),
    Column(
        "train_logprobs",
        FLOATS,
        "Per response token: the trainer's before the update, 0 at tokens of others; null where it computed none.",
    ),
    Column("segments", SEGMENTS, "Runs of tokens with one origin (`Origin`) and version, the prompt first."),
    Column(
        "extras",
        EXTRAS,
        "More values per token from the server: of each array its place in `segments`, name, numpy dtype, shape "
        "`[num_tokens, ...]` and bytes in C order; null where there are none.",
    ),
)
"""Everything about its tokens."""

TEXTS = (
    Column("messages", TEXT, "JSON: OpenAI messages, images described."),
    Column("tool_schemas", TEXT, "JSON: the OpenAI function schemas that the model was shown."),
    Column("answer", TEXT, "The text of the last assistant message."),
    Column("feedback", TEXT, "JSON: a list of `{origin, name, place, reward, incident, extra}`."),
    Column("incidents", TEXT, "JSON: a list of `{kind, detail, assistant_turn}`."),
    Column("spans", TEXT, "JSON: a list of `[kind, name, start, end, details]`; null without a trace."),
    Column("metrics", TEXT, "JSON: the `AgentLoopMetrics`."),
    Column("reward_extra", TEXT, "JSON: what else the reward function returned."),
    Column("extra_fields", TEXT, "JSON: what else the loop handed on."),
)
"""What people read."""

GROUPS = {"who": WHO, "result": RESULT, "time": TIME, "tokens": TOKENS, "text": TEXTS}
"""All columns, in the order of the file."""
SCALARS = tuple(
    column.name for column in (*WHO, *RESULT, *TIME) if column.name not in ("row", "failure_traceback")
)
"""Those that are quick to read of a whole run."""
SCHEMA = pa.schema([(column.name, column.type) for group in GROUPS.values() for column in group])


def markdown() -> str:
    """The columns as tables, for the documentation."""
    lines: list[str] = []
    for group, columns in GROUPS.items():
        lines += [f"### {group}", "", "| column | type | |", "|---|---|---|"]
        lines += [f"| `{column.name}` | `{column.type}` | {column.about} |" for column in columns]
        lines.append("")
    return "\n".join(lines)
