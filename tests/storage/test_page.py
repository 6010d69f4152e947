"""The page on stored trajectories is correct: its columns, queries and programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agent_loop.storage import StoredRun, text_of, to_trajectory, write_trajectories, write_vocabulary
from agent_loop.storage.columns import SCHEMA
from tests.helpers import small_tokenizer
from tests.storage.samples import failed, solved

PAGE = Path(__file__).parents[2] / "docs" / "trajectories.md"


def test_the_page_lists_every_column() -> None:
    page = PAGE.read_text(encoding="utf-8")
    columns = re.findall(r"^\| `(\w+)` \| `(.*?)` \| .+ \|$", page, flags=re.MULTILINE)
    assert columns == [(field.name, str(field.type)) for field in SCHEMA]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs" / "train"
    for step in (1, 12):
        for split in ("train", "val"):
            path = folder / "trajectories" / f"{split}-{step:06d}.parquet"
            write_trajectories(path, [solved(), failed()], step=step, split=split)
    write_vocabulary(folder / "vocabulary.json", small_tokenizer())
    monkeypatch.chdir(tmp_path)
    return folder


def code(language: str, number: int) -> str:
    blocks = PAGE.read_text(encoding="utf-8").split(f"```{language}\n")[1:]
    return blocks[number].split("```")[0]


def test_the_queries_of_the_page_run(run: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    first, second, _ = code("sql", 0).split(";")
    assert sorted(duckdb.sql(first).fetchall()) == [
        (1, "answered", 1, 0.1),
        (1, "failed", 1, None),
        (12, "answered", 1, 0.1),
        (12, "failed", 1, None),
    ]
    assert duckdb.sql(second).fetchall()[0] == ("group=0/rollout=0", "4", "4", "4")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_programs_of_the_page_run(run: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(run / "cache"))
    program = code("python", number).replace("group=3/rollout=1", "group=0/rollout=0")
    program = program.replace('load_dataset("parquet", ', f'load_dataset("parquet", cache_dir={str(run)!r}, ')
    exec(compile(program, str(PAGE), "exec"), {})


def test_json_columns_are_strict(run: Path) -> None:
    def fail(name: str) -> None:
        raise AssertionError(name)

    for row in StoredRun(run).rows():
        for name in ("row", "messages", "feedback", "incidents", "metrics", "reward_extra", "extra_fields"):
            json.loads(row[name], parse_constant=fail)


def test_functions_of_the_package_work_as_the_page_describes(run: Path) -> None:
    stored = StoredRun(run)
    row = stored.trajectory("train", 12, "group=0/rollout=0")
    assert text_of([2], stored.vocabulary()) == "<|im_end|>"
    assert to_trajectory(row).output.answer == "4"
