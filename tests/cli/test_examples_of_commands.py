"""The commands in README, docs and `--help` run as they are printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from agent_loop.cli import app
from agent_loop.config import load_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
COMMANDS: Any = typer.main.get_command(app)
SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)+=.*")


def commands(group: Any = COMMANDS) -> Iterator[tuple[str, Any]]:
    """Yield the name and the command of each command of a group and of its subgroups."""
    for name, command in group.commands.items():
        if not hasattr(command, "commands"):
            yield name, command
        else:
            for sub_name, sub_command in commands(command):
                yield f"{name} {sub_name}", sub_command


def printed() -> Iterator[tuple[str, str]]:
    for name, command in commands():
        for line in re.findall(r"^\s*(agent-loop \S.*)$", command.help, flags=re.MULTILINE):
            yield f"{name} --help", line
    for page in PAGES:
        for block in re.findall(
            r"```(?:bash|sh)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL
        ):
            for line in re.findall(r"^(agent-loop \S.*)$", block.replace("\\\n", " "), flags=re.MULTILINE):
                yield str(page.relative_to(ROOT)), line


@pytest.mark.parametrize(("where", "line"), list(printed()))
def test_a_printed_command_has_the_options_and_settings_that_it_uses(where: str, line: str) -> None:
    line = re.split(r" \| | > | && |; ", line)[0]
    _, name, *arguments = shlex.split(line, comments=True)
    if "--help" in arguments:
        return
    if hasattr(COMMANDS.commands[name], "commands"):
        if not arguments and COMMANDS.commands[name].invoke_without_command:
            return
        name = f"{name} {arguments.pop(0)}"
    # (raises a usage error if an option does not exist)
    dict(commands())[name].make_context(name, arguments)
    if name != "check sandbox":
        settings = [argument for argument in arguments if SETTING.fullmatch(argument)]
        load_config(overrides=[setting for setting in settings if "..." not in setting])
