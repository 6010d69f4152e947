"""`-v` and `-q`, and the exceptions of users' code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from agent_loop.cli import app
from agent_loop.cli.verbosity import set_verbosity
from agent_loop.runtime.describe import short_traceback
from tests.cli.project import Command

THROUGH_A_LIBRARY = """
import json

def reward(output, row):
    return json.loads(row["answer"])
"""
TRACEBACK = """Traceback (most recent call last):
  File "{package}/rewards/function.py", line 81, in score
    returned = await call_function(self.function)
               ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/home/me/task.py", line 5, in reward
    return json.loads(row["answer"])
           ^^^^^^^^^^^^^^^^^^^^^^^^^
  File "{library}/json/__init__.py", line 339, in loads
    raise TypeError(f'the JSON object must be str')
TypeError: the JSON object must be str
"""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    set_verbosity(verbose=0, quiet=False)


def test_every_command_has_both_options() -> None:
    def options(found: object) -> Iterator[tuple[str, set[str]]]:
        for name, inner in getattr(found, "commands", {}).items():
            if getattr(inner, "commands", None):
                yield from options(inner)
            else:
                yield name, {each for option in inner.params for each in option.opts}

    commands = list(options(get_command(app)))
    assert len(commands) > 25
    assert [name for name, opts in commands if not {"-v", "--verbose", "-q", "--quiet"} <= opts] == []


def test_the_short_traceback_ends_with_the_users_frame() -> None:
    text = TRACEBACK.format(package=Path(typer.__file__).parents[1], library=Path(json.__file__).parents[1])
    assert short_traceback(text) == [
        '  File "/home/me/task.py", line 5, in reward',
        '    return json.loads(row["answer"])',
        "TypeError: the JSON object must be str",
    ]
    assert short_traceback("killed\n") == ["killed"]


def test_an_exception_of_a_reward_is_shown_with_its_line_and_row_and_v_shows_all_of_it(
    command: Command,
) -> None:
    Path("own.py").write_text(THROUGH_A_LIBRARY, encoding="utf-8")
    Path("rows.jsonl").write_text('{"prompt": "What is 2 * 3?", "answer": 6}\n', encoding="utf-8")
    arguments = ["config.yaml", "reward.function=own.py:reward", "-n", "1"]
    short = command("rollout", *arguments)
    assert short.exit_code == 2
    lines = short.err[short.err.index("RolloutError") :].splitlines()
    assert len(lines) <= 5
    assert "first in group=0/rollout=0, 'What is 2 * 3?':" in lines
    assert lines[-3].endswith('own.py", line 5, in reward')
    assert lines[-2] == '    return json.loads(row["answer"])'
    assert lines[-1].startswith("TypeError: the JSON object must be str")
    assert "Traceback" not in short.err

    verbose = command("rollout", *arguments, "-v", "--out", "other.parquet")
    assert "json/__init__.py" in verbose.err
    assert "RolloutError" in verbose.err


def test_quiet_leaves_the_result(command: Command) -> None:
    loud = command("rollout", "config.yaml", "-n", "1")
    assert "agent-loop view trajectories.parquet" in loud.out
    quiet = command("rollout", "config.yaml", "-n", "1", "-q")
    assert quiet.exit_code == 0, quiet.err
    assert "6 trajectories in trajectories.parquet" in quiet.out
    assert "agent-loop view" not in quiet.out
    both = command("rollout", "config.yaml", "-q", "-v")
    assert both.exit_code == 2
    assert "-v and -q exclude each other" in both.err
