"""Rows of a wrong form, and functions of rows that fail, are refused with their location."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import DataError
from agent_loop.rollout.rows import load_rows


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"tools_kwargs": 5}, r"line 1: tools_kwargs is 5 \(int\); give a mapping"),
        ({"tools_kwargs": ["add"]}, "tools_kwargs is"),
        ({"tools_kwargs": {"add": 5}}, r"tools_kwargs.add is 5 \(int\)"),
        (
            {"tools_kwargs": {"add": {"create_kwargs": [1]}}},
            r"tools_kwargs.add.create_kwargs is \[1\] \(list\)",
        ),
        ({"extra_info": {"tools_kwargs": 5}}, "tools_kwargs is 5"),
        ({"interaction_kwargs": [1]}, r"interaction_kwargs is \[1\] \(list\)"),
        ({"agent_name": 5}, r"agent_name is 5 \(int\)"),
        ({"self": 1}, "a column 'self', which is an argument of every agent loop; rename it"),
        ({"sampling_params": 1}, "a column 'sampling_params'"),
        ({"prompt": [{"role": "user", "content": 5}]}, r"messages\[0\].content is 5 \(int\)"),
        ({"prompt": [{"role": "user", "content": [5]}]}, r"messages\[0\].content\[0\] is 5"),
        (
            {"prompt": [{"role": "user", "content": "", "tool_calls": 5}]},
            r"messages\[0\].tool_calls is 5 \(int\)",
        ),
    ],
)
def test_a_column_of_the_wrong_form_is_refused_with_its_location(
    tmp_path: Path, columns: dict[str, Any], complaint: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "What is 1 + 2?", **columns}), encoding="utf-8")
    with pytest.raises(DataError, match=complaint) as refused:
        load_rows([str(path)], prompt_key="prompt")
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_json_that_cannot_be_read_is_refused_with_its_location(tmp_path: Path, name: str) -> None:
    row = f'{{"prompt": "x", "extra": {"9" * 5000}}}'
    path = tmp_path / name
    path.write_text(f"[{row}]" if name.endswith(".json") else row, encoding="utf-8")
    with pytest.raises(DataError, match="an integer of thousands of digits") as refused:
        load_rows([str(path)], prompt_key="prompt")
    assert str(path) in str(refused.value)


DATA = """
def raises():
    raise KeyError("x")

def raises_later():
    yield {"prompt": "x"}
    raise RuntimeError("no more")

def ends_the_process():
    raise SystemExit(3)

def needs_arguments(count):
    return []

def calls_itself():
    return calls_itself()

async def is_async():
    return []

def returns_nothing():
    pass
"""


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("raises", r"raised KeyError: 'x' \(data.py line 3\); fix the function"),
        ("raises_later", r"raised RuntimeError: no more \(data.py line 7\)"),
        ("ends_the_process", "raised SystemExit: 3"),
        ("needs_arguments", "missing 1 required positional argument: 'count'"),
        ("calls_itself", "raised RecursionError"),
        ("is_async", "define it with def, not with async def"),
        ("returns_nothing", "returned None"),
    ],
)
def test_the_error_of_a_data_function_names_its_line(tmp_path: Path, function: str, complaint: str) -> None:
    path = tmp_path / "data.py"
    path.write_text(DATA, encoding="utf-8")
    with pytest.raises(DataError, match=complaint) as refused:
        load_rows([f"{path}:{function}"], prompt_key="prompt")
    assert f"data.py:{function}" in str(refused.value)
