from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from agent_loop.storage.row_texts import MAX_LETTERS, text_columns


def columns_of(**columns: list[Any]) -> dict[str, list[Any]]:
    texts = {
        name: [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
        for name, values in columns.items()
    }
    found = text_columns(pa.table({name: pa.array(values, pa.string()) for name, values in texts.items()}))
    return {name: column.to_pylist() for name, column in found.items()}


@pytest.mark.parametrize(
    ("row", "prompt", "target"),
    [
        (
            {
                "raw_prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "How\nmany?"}],
                "answer": 3,
            },
            "How many?",
            "3",
        ),
        ({"raw_prompt": [{"role": "system", "content": "Play."}]}, "Play.", None),
        ({"prompt": "x" * 500, "reward_model": {"ground_truth": ["a", "b"]}}, "x" * 199 + "…", "a b"),
        (
            {
                "raw_prompt": [
                    {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image"}]}
                ]
            },
            'see {"type": "image"}',
            None,
        ),
        ([1], None, None),
        ("not json", None, None),
    ],
)
def test_prompt_and_target_are_read_from_the_row(row: Any, prompt: str | None, target: str | None) -> None:
    found = columns_of(row=[row])
    assert (found.get("prompt", [None])[0], found.get("target", [None])[0]) == (prompt, target)
    assert len(found.get("prompt", [""])[0] or "") <= MAX_LETTERS


def test_each_number_of_the_reward_function_is_a_column() -> None:
    extras = ['{"exact": 1, "ok": true, "note": "x", "odd": NaN}', None, {"exact": 0.5}]
    found = columns_of(reward_extra=extras)
    assert found == {"reward/exact": [1.0, None, 0.5], "reward/ok": [1.0, None, None]}


def test_columns_that_are_missing_or_empty_are_left_out() -> None:
    assert text_columns(pa.table({"step": [1]})) == {}
    assert columns_of(answer=["", None], row=[None, None]) == {}
