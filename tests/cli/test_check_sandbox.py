"""`agent-loop check-sandbox`, as a shell runs it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.errors import ConfigError
from tests.tools.sandboxes import SMALL, python_tool


def run(*settings: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["check-sandbox", f"python={SMALL['python']}", *settings])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result.exit_code, result.stdout.splitlines()


def test_one_way_is_taken_and_the_others_are_told() -> None:
    tool = python_tool()
    code, lines = run()
    assert code == 0
    assert [line.split()[0] for line in lines].count("taken") == 1
    (taken,) = [line for line in lines if line.startswith("taken")]
    mechanism, _, isolation = tool.isolation.partition(": ")
    assert taken == f"taken     {mechanism:10}  {isolation}"
    assert lines[-1].startswith("too weak  limits")


def test_a_way_that_fails_says_why() -> None:
    code, (line,) = run("mechanism=bubblewrap", "bubblewrap=/no/bwrap")
    assert code == 1
    assert line == "fails     bubblewrap  there is no program /no/bwrap; install bubblewrap"


def test_less_is_taken_where_it_is_allowed() -> None:
    code, (line,) = run("mechanism=limits", "allow_weaker_isolation=true")
    assert code == 0
    assert line.startswith("taken     limits")
    assert "(not in force: files of the host out of reach; " in line


@pytest.mark.parametrize(
    ("setting", "says"),
    [("mechanisms=x", "did you mean 'mechanism'"), ("mechanism=[x", "'mechanism=.x' cannot be read")],
)
def test_a_wrong_setting_is_named(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(setting)
