"""Queries over stored trajectories, and preference pairs for trainers of other libraries."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.errors import DataError, did_you_mean
from agent_loop.storage.columns import JSON_COLUMNS, SCALARS, SCHEMA
from agent_loop.storage.run import KEY, Key, StoredRun
from agent_loop.storage.schema import compute, pa

SEARCHED = ("messages", "answer", "failure", "feedback", "incidents")
"""Columns of text in which a query searches."""
_CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*")
_JSON_KEY = r'\\*"\w+\\*":'
"""Key of an object in a JSON document, or in a text in it that is JSON too."""
_OPERATIONS = {
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
    "=": "equal",
    "==": "equal",
    "!=": "not_equal",
}
HEADINGS = {
    "trajectory": "trajectory_id",
    "ended": "stop_reason",
    "turns": "num_assistant_turns",
    "calls": "num_tool_calls",
    "failed": "num_failed_calls",
    "incidents": "num_incidents",
    "tokens": "num_model_tokens",
}
"""Headings of the table of `agent-loop show`, and their columns."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Comparison of a column with a value."""

    column: str
    operation: str
    """Arrow's name of the operation."""
    value: Any
    """Value of the column's type; None is null."""

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse a condition such as `reward<1`, `stop_reason=answered` or `failure!=null`.

        Raises:
            DataError: The text is not a comparison, the column does not exist, or the value has another type.
        """
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise DataError(
                f"{text!r} is not a comparison; give a condition like 'reward<1' or 'stop_reason=answered'"
            )
        given, operation, value = found.groups()
        column = column_named(given)
        if value == "null":
            if operation not in ("=", "==", "!="):
                raise DataError(f"{text!r} compares with null; only = and != can")
            return cls(column, _OPERATIONS[operation], None)
        try:
            return cls(column, _OPERATIONS[operation], _value(value, SCHEMA.field(column).type))
        except ValueError:
            kind = "true or false" if pa.types.is_boolean(SCHEMA.field(column).type) else "a number"
            raise DataError(
                f"{text!r} compares {column}, which is {kind}, with {value!r}; give {kind} after one of < <= = != >= >"
            ) from None

    def holds(self, table: Any) -> Any:
        """Return a mask of the table's rows that fulfil the condition."""
        column = table[self.column]
        if self.value is None:
            is_null = compute.is_null(column)
            return is_null if self.operation == "equal" else compute.invert(is_null)
        compared = getattr(compute, self.operation)(column, pa.scalar(self.value))
        return compute.fill_null(compared, False)


def find(
    run: StoredRun,
    *,
    split: str | None = None,
    step: int | None = None,
    where: Sequence[Condition] = (),
    text: str | None = None,
    sort: str | None = None,
) -> Any:
    """Return the scalar columns of the matching trajectories as a pyarrow Table.

    Args:
        run: The stored trajectories.
        split: Only trajectories of this split.
        step: Only trajectories of this step.
        where: Conditions that a trajectory must fulfil.
        text: Text that one of the columns `SEARCHED` must contain, in any case.
        sort: Column to sort by, smallest first; largest first with a `-` before the name.
    """
    table = run.scalars(split=split, step=step)
    if text is not None:
        table = table.filter(contains(run.scalars(split=split, step=step, columns=SEARCHED), text))
    for condition in where:
        table = table.filter(condition.holds(table))
    if sort is not None:
        column, order = (sort[1:], "descending") if sort.startswith("-") else (sort, "ascending")
        table = table.sort_by([(column_named(column), order)])
    return table


def column_named(name: str) -> str:
    """Return the column of a name, or of a heading of `agent-loop show`."""
    column = HEADINGS.get(name, name)
    if column not in SCALARS:
        raise DataError(f"there is no column {name!r} to compare{did_you_mean(name, (*SCALARS, *HEADINGS))}")
    return column


def _value(text: str, kind: Any) -> Any:
    if pa.types.is_boolean(kind):
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return float(text)
    return text.strip("'\"")


def contains(table: Any, text: str) -> Any:
    """Return a mask of the rows that contain a text, in any case. The keys of JSON documents are not searched."""
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    forms = {text, escaped, json.dumps(escaped, ensure_ascii=False)[1:-1]}
    mask: Any = pa.array([False] * table.num_rows)
    for name in table.column_names:
        column = table[name]
        if name in JSON_COLUMNS:
            column = compute.replace_substring_regex(column, _JSON_KEY, "")
        for form in forms:
            found = compute.match_substring(column, form, ignore_case=True)
            mask = compute.or_(mask, compute.fill_null(found, False))
    return mask


def preference_pairs(run: StoredRun, *, where: Sequence[Condition] = ()) -> Iterator[dict[str, Any]]:
    """Yield the best and the worst trajectory of each group of a step whose rewards differ.

    A pair is a row of a preference data set, in the conversational form of TRL.

    Trajectories without a reward, and those whose conversation does not begin with the prompt of the other, are left
    out. Of equal rewards, the first trajectory counts.

    Args:
        run: The stored trajectories.
        where: Conditions that a trajectory must fulfil.
    """
    table = find(run, where=[*where, Condition("reward", "not_equal", None)])
    groups: defaultdict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in table.select([*KEY, "group", "reward"]).to_pylist():
        groups[row["split"], row["step"], row["group"]].append(row)
    extremes = [(max(rows, key=_reward), min(rows, key=_reward)) for rows in groups.values()]
    keys = [(_key(best), _key(worst)) for best, worst in extremes if _reward(best) > _reward(worst)]
    stored = {
        _key(row): (json.loads(row["messages"]), json.loads(row["tool_schemas"]), row["reward"])
        for row in run.rows_of(key for pair in keys for key in pair)
    }
    for best, worst in keys:
        chosen, tools, chosen_reward = stored[best]
        rejected, _, rejected_reward = stored[worst]
        num_prompt = next((n for n, message in enumerate(chosen) if message["role"] == "assistant"), None)
        if num_prompt is None or chosen[:num_prompt] != rejected[:num_prompt] or len(rejected) == num_prompt:
            continue
        yield {
            "prompt": chosen[:num_prompt],
            "chosen": chosen[num_prompt:],
            "rejected": rejected[num_prompt:],
            "tools": tools,
            "chosen_reward": chosen_reward,
            "rejected_reward": rejected_reward,
        }


def _key(row: Mapping[str, Any]) -> Key:
    return row["split"], row["step"], row["trajectory_id"]


def _reward(row: Mapping[str, Any]) -> float:
    return row["reward"]
