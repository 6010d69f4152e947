"""Names of tasks, and splits that cannot overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.environments.tasks import is_task_name, parse_task_name, select_rows, split_of
from agent_loop.errors import ConfigError, DataError
from agent_loop.rollout.rows import load_rows
from tests.environments.sums import SumOptions, SumSuite, use_sums


@pytest.fixture(autouse=True)
def _suites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_sums(monkeypatch)
    monkeypatch.chdir(tmp_path)


def load(*sources: str) -> list[dict[str, Any]]:
    return load_rows(sources, prompt_key="prompt")


def test_a_name_gives_rows_with_the_columns_that_the_loop_reads() -> None:
    rows = load("sums:easy?size=2&seed=7")
    assert [row["raw_prompt"] for row in rows] == [
        [{"role": "user", "content": "7 + 1"}],
        [{"role": "user", "content": "8 + 1"}],
    ]
    added = {"agent_name": "environment_agent", "environment": "sums", "data_source": "sums:easy"}
    assert all(row.items() >= added.items() for row in rows)


def test_size_counts_the_rows_of_the_split() -> None:
    train, val = load("sums:easy?size=30&split=train"), load("sums:easy?size=20&split=val")
    assert (len(train), len(val)) == (30, 20)
    assert not {row["total"] for row in train} & {row["total"] for row in val}
    assert len({row["total"] for row in val}) < 20  # the generator repeats its questions


@given(st.lists(st.text(max_size=3), max_size=60))
def test_splits_never_share_a_task_and_lose_none(identities: list[str]) -> None:
    rows = [{"text": text} for text in identities]

    def of(split: Any) -> list[str]:
        try:
            return [
                row["text"]
                for row in select_rows(
                    rows, split=split, identity=lambda row: row["text"], size=None, where="rows"
                )
            ]
        except DataError:
            return []

    train, val = of("train"), of("val")
    assert not {*train} & {*val}
    assert sorted(train + val) == sorted(identities) == sorted(of(None))


def test_a_split_that_a_generator_never_reaches_is_an_error() -> None:
    lost = {"train": "val", "val": "train"}[
        split_of(SumSuite().identity({"raw_prompt": "0 + 1", "total": 1}))
    ]
    with pytest.raises(
        DataError, match=rf"only 0 of 1200 generated rows belong to split={lost}, and size is 2"
    ):
        load(f"sums:same?size=2&split={lost}")
    assert len(load("sums:same?size=2")) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sum:easy", "no suite of tasks named 'sum'; did you mean 'sums'?"),
        ("nothing:easy?size=3", "no suite of tasks named 'nothing'; there are: absent, sums"),
        ("sums:eazy", "'sums:eazy': the suite 'sums' has no task 'eazy'; did you mean 'easy'?"),
        ("sums:", "names no task; give sums:TASK, for example sums:easy"),
        ("sums:easy?siz=3", "sums:easy\\?siz=3: unknown key 'siz'; did you mean 'size'?"),
        ("sums:easy?size=no", "size is 'no'"),
        ("sums:easy?size", "'size' is not an option; give option=value"),
        ("sums:easy?size=1&size=2", "gives 'size' twice"),
        ("sums:easy?split=test", "split is 'test'; give train or val"),
        ("absent:easy", 'pip install "agent-loop\\[absent\\]"'),
    ],
)
def test_a_wrong_name_is_a_clear_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(name)


def test_a_suite_that_raises_is_an_error_with_the_name_of_the_task() -> None:
    with pytest.raises(DataError, match="sums:broken: making its rows raised ZeroDivisionError: no sums"):
        load("sums:broken")


def test_a_path_that_exists_wins_over_a_name(tmp_path: Path) -> None:
    assert is_task_name("sums:easy")
    (tmp_path / "sums:easy").mkdir()
    assert not is_task_name("sums:easy")
    assert is_task_name("sums:same")
    (tmp_path / "sums").mkdir()
    assert not is_task_name("sums:same")


def test_values_of_options_may_be_percent_encoded() -> None:
    name = parse_task_name("sums:easy?size=%33&split=val")
    assert (name.suite, name.task, name.split, name.options) == ("sums", "easy", "val", SumOptions(size=3))
