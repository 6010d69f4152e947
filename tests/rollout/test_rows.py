"""Loading of rows from files and functions, and their selection by the step alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from agent_loop.errors import DataError
from agent_loop.rollout.rows import RowSampler, load_rows, prepare_rows


def test_the_same_rows_are_read_from_every_kind_of_source(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": 2},
        {
            "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2?"}],
            "answer": 3,
        },
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "task.py").write_text(f"def make():\n    yield from {rows!r}\n")
    expected = [row | {"raw_prompt": row["prompt"]} for row in rows]

    for name in ("rows.json", "rows.jsonl", "rows.parquet", "task.py:make"):
        assert load_rows([str(tmp_path / name)], prompt_key="prompt") == expected
    both = [str(tmp_path / "rows.json"), str(tmp_path / "task.py:make")]
    assert load_rows(both, prompt_key="prompt") == expected * 2


def test_messages_have_one_form_whatever_wrote_them(tmp_path: Path) -> None:
    def call(name: str, arguments: Any) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}

    def chat(*calls: dict[str, Any], content: Any = "hi") -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "", "tool_calls": [*calls]},
        ]

    image = {"type": "image", "image": "a.png"}
    messages = [
        chat(call("calculate", {"expression": "1 + 2"})),
        chat(call("search", {"query": "a", "options": {"top": 3}})),
        chat(call("list", {}), content=[{"type": "text", "text": "hi"}, image]),
    ]
    rows = [{"prompt": prompt} for prompt in messages]
    parquet.write_table(pa.Table.from_pylist(rows[:2]), tmp_path / "rows.parquet")
    parquet.write_table(pa.Table.from_pylist([{"prompt": messages[2][:1]}]), tmp_path / "image.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows[:2])))
    text = [{"type": "text", "text": "hi"}]
    in_memory = [
        {"prompt": chat(call("calculate", '{"expression": "1 + 2"}'), content=np.array(text, dtype=object))},
        {
            "prompt": np.array(
                chat(call("search", {"query": "a", "options": {"top": np.int64(3)}}), content=text)
            )
        },
        {"prompt": chat(call("list", ""), content=[*text, image])},
    ]

    assert [row["raw_prompt"] for row in load_rows([str(tmp_path / "rows.jsonl")])] == messages[:2]
    assert [row["raw_prompt"] for row in load_rows([str(tmp_path / "rows.parquet")])] == messages[:2]
    assert load_rows([str(tmp_path / "image.parquet")])[0]["raw_prompt"] == messages[2][:1]
    assert [row["raw_prompt"] for row in prepare_rows(in_memory, prompt_key="prompt")] == messages


def test_text_becomes_one_user_message_and_raw_prompt_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "Why?"}\n{"raw_prompt": [{"role": "user", "content": "How?"}]}\n')

    first, second = load_rows([str(path)], prompt_key="question")

    assert first == {"question": "Why?", "raw_prompt": [{"role": "user", "content": "Why?"}]}
    assert second["raw_prompt"] == [{"role": "user", "content": "How?"}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"rows.jsonl line 2 is not JSON"),
        ("rows.json", '[\n{"prompt": }]', r"rows.json is not JSON: Expecting value at line 2 column 12"),
        ("rows.json", '{"prompt": "a"}', r"holds a dict; a .json data file holds a list"),
        ("rows.jsonl", "[1]\n", r"line 1 is a list; a row is a mapping"),
        (
            "rows.jsonl",
            '{"prompts": "a", "b": 1}',
            r"line 1 has no 'prompt' \(columns: prompts, b\).*mean 'prompts'",
        ),
        ("rows.json", '[{"prompt": "a"}, {"prompt": null}]', r"row 2 has no 'prompt'"),
        ("rows.json", '[{"prompt": 3}]', r"row 1, column 'prompt' is a int; give text"),
        ("rows.json", '[{"prompt": []}]', r"is an empty list"),
        ("rows.json", '[{"prompt": ["hi"]}]', r"messages\[0\] is 'hi'"),
        ("rows.json", '[{"prompt": [{"content": "hi"}]}]', r"messages\[0\] has the keys \['content'\]"),
        ("rows.json", "[]", r"no rows in .*rows.json"),
        ("rows.parquet", "PAR", r"cannot be read as Parquet"),
    ],
)
def test_an_invalid_file_is_refused_with_its_location(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(DataError, match=message):
        load_rows([str(tmp_path / name)], prompt_key="prompt")


def test_loading_rows_does_not_import_torch() -> None:
    code = "import sys, agent_loop.rollout.rows; sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_epoch_contains_every_row_once_in_a_different_order() -> None:
    rows = [{"n": n} for n in range(10)]
    sampler = RowSampler(rows, batch_size=4, seed=3)

    drawn = [row["n"] for step in range(1, 11) for row in sampler.batch(step)]

    epochs = [drawn[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_batch_depends_on_step_and_seed_only() -> None:
    rows = [{"n": n} for n in range(10)]
    sampler = RowSampler(rows, batch_size=4, seed=3)
    sampler.batch(1)

    assert sampler.batch(7) == RowSampler(rows, batch_size=4, seed=3).batch(7)
    assert sampler.batch(7) != RowSampler(rows, batch_size=4, seed=4).batch(7)


def test_a_data_set_smaller_than_the_batch_is_refused() -> None:
    with pytest.raises(DataError, match=r"has 2 rows, fewer than data.train_batch_size=3"):
        RowSampler([{}, {}], batch_size=3)
