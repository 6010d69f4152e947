"""Names of tasks, splits that cannot overlap, and the page on environments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop import AgentLoopManager
from agent_loop.config import load_config
from agent_loop.environments.tasks import (
    SUITES,
    is_task_name,
    load_suite,
    parse_task_name,
    select_rows,
    split_of,
)
from agent_loop.errors import ConfigError, DataError
from agent_loop.rollout.rows import load_rows
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.environments.sums import SumOptions, SumSuite, use_sums
from tests.helpers import small_tokenizer, user

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"^## Your own environment\n(.*?)^## ", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _in_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> None:
    use_sums(monkeypatch)


with_sums = pytest.mark.usefixtures("sums")


def load(*sources: str) -> list[dict[str, Any]]:
    return load_rows(sources, prompt_key="prompt")


@with_sums
def test_a_name_gives_rows_with_the_columns_that_the_loop_reads() -> None:
    rows = load("sums:easy?size=2&seed=7")
    assert [row["raw_prompt"] for row in rows] == [user("7 + 1"), user("8 + 1")]
    added = {"agent_name": "environment_agent", "environment": "sums", "data_source": "sums:easy"}
    assert all(row.items() >= added.items() for row in rows)


@with_sums
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
            selected = select_rows(
                rows, split=split, identity=lambda row: row["text"], size=None, where="rows"
            )
            return [row["text"] for row in selected]
        except DataError:
            return []

    train, val = of("train"), of("val")
    assert not {*train} & {*val}
    assert sorted(train + val) == sorted(identities) == sorted(of(None))


@with_sums
def test_a_split_that_a_generator_never_reaches_is_an_error() -> None:
    [row] = load("sums:same?size=1")
    lost = {"train": "val", "val": "train"}[split_of(SumSuite().identity(row))]
    message = rf"only 0 of 1200 generated rows belong to split={lost}, and size is 2"
    with pytest.raises(DataError, match=message):
        load(f"sums:same?size=2&split={lost}")
    assert len(load("sums:same?size=2")) == 2


@with_sums
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


@with_sums
def test_a_suite_that_raises_is_an_error_with_the_name_of_the_task() -> None:
    with pytest.raises(DataError, match="sums:broken: making its rows raised ZeroDivisionError: no sums"):
        load("sums:broken")


@with_sums
def test_a_path_that_exists_wins_over_a_name() -> None:
    assert is_task_name("sums:easy")
    Path("sums:easy").mkdir()
    assert not is_task_name("sums:easy")
    assert is_task_name("sums:same")
    Path("sums").mkdir()
    assert not is_task_name("sums:same")


@with_sums
def test_values_of_options_may_be_percent_encoded() -> None:
    name = parse_task_name("sums:easy?size=%33&split=val")
    assert (name.suite, name.task, name.split, name.options) == ("sums", "easy", "val", SumOptions(size=3))


def roll_out_example(*replies: str) -> Trajectory:
    """Run the environment of the page as it is printed."""
    assert EXAMPLE is not None
    (code,) = re.findall(r"```python\n(.*?)```", EXAMPLE[1], flags=re.DOTALL)
    (config,) = re.findall(r"```yaml\n(.*?)```", EXAMPLE[1], flags=re.DOTALL)
    body = code.partition("\n\n\n")[2]
    assert len([line for line in body.splitlines() if line]) <= 15
    script = (
        f"from tests.helpers import text_reply\nscript = [text_reply(text) for text in {list(replies)!r}]\n"
    )
    for name, text in {"guess.py": code, "config.yaml": config, "script.py": script}.items():
        Path(name).write_text(text, encoding="utf-8")
    small_tokenizer().save_pretrained("model")
    engine = ["rollout.engine=scripted", "rollout.engine_kwargs.script=script.py:script"]
    settings = load_config("config.yaml", overrides=["model.path=model", *engine])

    async def run() -> Trajectory:
        async with AgentLoopManager.from_config(settings) as manager:
            [trajectory] = await manager.run([{"raw_prompt": user("Play."), "number": 17}], n=1)
            return trajectory

    return run_virtual(run())


def test_the_environment_of_the_page_replies_and_rewards() -> None:
    found = roll_out_example("I guess 50.", "Hm", "17")
    assert found.output.failure is None
    texts = [message["content"] for message in found.output.messages[1:]]
    assert texts[:5] == ["I guess 50.", "lower", "Hm", "higher", "17"]
    assert found.reward == 1


def test_the_limit_of_the_page_ends_a_game_without_a_reward() -> None:
    lost = roll_out_example(*["1"] * 8)
    assert (lost.output.stop_reason, lost.reward) == (StopReason.MAX_ASSISTANT_TURNS, 0)


def test_the_page_lists_every_suite_with_its_extra() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|[^|]*\|$", PAGE, flags=re.MULTILINE))
    assert not SUITES.keys() - listed.keys()
    for name in SUITES:
        suite = load_suite(name)
        assert (f"agent-loop[{suite.extra}]" in listed[name]) == bool(suite.extra), name
