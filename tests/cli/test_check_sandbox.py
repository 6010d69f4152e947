"""`agent-loop check sandbox`, as a shell runs it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.errors import ConfigError
from tests.tools.sandboxes import SMALL, python_tool


def run(*settings: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["check", "sandbox", f"python={SMALL['python']}", *settings])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result.exit_code, result.stdout.splitlines()


def test_the_command_names_the_mechanism_that_the_python_tool_uses() -> None:
    tool = python_tool()
    code, lines = run()
    assert code == 0
    mechanism, _, isolation = tool.isolation.partition(": ")
    assert f"passed   {mechanism} ({isolation})" in lines
    assert lines[1].startswith("failed   limits (too weak: ")
    assert lines[-1] == f"The python tool uses {mechanism}."


def test_a_mechanism_that_fails_is_printed_with_the_reason() -> None:
    code, (line, counts) = run("mechanism=landlock", "python=/no/python")
    assert code == 1
    assert line.startswith("failed   landlock (/no/python could not be started: ")
    assert counts == "sandbox: 0 passed, 1 failed, 0 skipped"


def test_a_weak_mechanism_passes_if_the_settings_allow_it() -> None:
    code, (line, _, used) = run("mechanism=limits", "allow_weaker_isolation=true")
    assert code == 0
    assert line.startswith("passed   limits")
    assert "(not in force: files of the host out of reach; " in line
    assert used == "The python tool uses limits."


def test_the_command_prints_json() -> None:
    code, lines = run("mechanism=landlock", "python=/no/python", "--json")
    assert code == 1
    (result,) = json.loads("\n".join(lines))["sandbox"]
    assert (result["name"], result["verdict"]) == ("landlock", "failed")


@pytest.mark.parametrize(
    ("setting", "message"),
    [("mechanisms=x", "did you mean 'mechanism'"), ("mechanism=[x", "'mechanism=.x' cannot be read")],
)
def test_a_wrong_setting_is_named(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(setting)
