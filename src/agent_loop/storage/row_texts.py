"""Columns of short texts and reward parts for tables of trajectories: prompt, last answer, target, reward parts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agent_loop.storage.schema import compute, pa

SOURCES = ("row", "answer", "reward_extra")
"""Stored columns that the texts are read from."""
PROMPT, ANSWER, TARGET = "prompt", "answer", "target"
PART_PREFIX = "reward/"
"""Prefix of a reward part's column. The part's name in `reward_extra` follows."""
MAX_LETTERS = 200
"""Characters of a text in a table. Longer texts are cut."""
MAX_PARTS = 40
TARGET_KEYS = ("ground_truth", "target", "answer", "solution", "expected", "label")
"""Keys of a row that may hold the right answer, the likeliest first, after `reward_model.ground_truth`."""


def text_columns(table: Any) -> dict[str, Any]:
    """Return the columns of a table with `SOURCES`: texts cut to `MAX_LETTERS`, and numbers of each reward part.

    Columns that the table lacks, and columns without a value, are left out.
    """
    columns: dict[str, Any] = {}
    if (rows := _strings(table, "row")) is not None:
        parsed = [_mapping(document) for document in _dictionary(rows)]
        columns[PROMPT] = _spread(rows, [_prompt(row) for row in parsed])
        columns[TARGET] = _spread(rows, [_target(row) for row in parsed])
    if (answers := _strings(table, ANSWER)) is not None:
        columns[ANSWER] = _spread(answers, [_one_line(text) for text in _dictionary(answers)])
    if (extras := _strings(table, "reward_extra")) is not None:
        columns |= _parts(extras)
    return {name: column for name, column in columns.items() if column.null_count < len(column)}


def _strings(table: Any, name: str) -> Any:
    """Return a column of texts with its distinct values; None if the table has no such column."""
    if name not in table.column_names or not pa.types.is_string(table[name].type):
        return None
    encoded = compute.dictionary_encode(table[name].combine_chunks())
    return encoded if isinstance(encoded, pa.DictionaryArray) else encoded.combine_chunks()


def _dictionary(encoded: Any) -> list[str]:
    return cast(list[str], encoded.dictionary.to_pylist())


def _spread(encoded: Any, values: Sequence[Any], kind: Any = None) -> Any:
    """Return one value per row, from one value per distinct text."""
    return compute.take(pa.array(values, kind or pa.string()), encoded.indices)


def _parts(extras: Any) -> dict[str, Any]:
    parsed = [_mapping(document) for document in _dictionary(extras)]
    names = list(dict.fromkeys(name for extra in parsed for name in extra))
    columns: dict[str, Any] = {}
    for name in names:
        values = [_number(extra.get(name)) for extra in parsed]
        if len(columns) < MAX_PARTS and any(value is not None for value in values):
            columns[PART_PREFIX + name] = _spread(extras, values, pa.float64())
    return columns


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, bool | int | float) and math.isfinite(value) else None


def _prompt(row: Mapping[str, Any]) -> str | None:
    """Return the last message of the user in the row's prompt."""
    prompt = row.get("raw_prompt", row.get("prompt", row.get("question")))
    if isinstance(prompt, list):
        messages = [cast(Mapping[str, Any], m) for m in cast(list[Any], prompt) if isinstance(m, Mapping)]
        texts = [message.get("content") for message in messages if message.get("role") == "user"]
        prompt = texts[-1] if texts else messages[-1].get("content") if messages else None
    return _one_line(prompt)


def _target(row: Mapping[str, Any]) -> str | None:
    model = row.get("reward_model")
    nested = cast(Mapping[str, Any], model).get("ground_truth") if isinstance(model, Mapping) else None
    given = [nested, *(row.get(key) for key in TARGET_KEYS)]
    return _one_line(next((value for value in given if value is not None), None))


def _one_line(value: Any) -> str | None:
    """Return a value as one line of text; None if it is empty."""
    if isinstance(value, list):
        parts = cast(list[Any], value)
        value = " ".join(_text_of(part) for part in parts)
    text = _text_of(value)[: 4 * MAX_LETTERS]
    line = " ".join(text.split())
    return f"{line[: MAX_LETTERS - 1]}…" if len(line) > MAX_LETTERS else line or None


def _text_of(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    is_text_part = isinstance(value, Mapping) and isinstance(cast(Mapping[str, Any], value).get("text"), str)
    return cast(Mapping[str, str], value)["text"] if is_text_part else json.dumps(value, ensure_ascii=False)


def _mapping(document: str) -> Mapping[str, Any]:
    """Return the object of a JSON document; empty if it is another value."""
    try:
        value = json.loads(document)
    except ValueError:
        return {}
    return cast(Mapping[str, Any], value) if isinstance(value, dict) else {}
