"""`agent-loop tasks`: the tasks that can be named in `data.train_files`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from agent_loop.cli.arguments import WIDTH_WITHOUT_TERMINAL
from agent_loop.cli.verbosity import print_line
from agent_loop.errors import ConfigError
from agent_loop.runtime.event_loop import run_to_end

if TYPE_CHECKING:
    from agent_loop.environments.suite import TaskSuite

NUM_ROWS = 3
MAX_SHOWN = 700
"""Characters of a message that are shown."""
tasks_app = typer.Typer(
    help="List the suites of tasks that can be named in `data.train_files`, and show their rows.",
    invoke_without_command=True,
    rich_markup_mode="markdown",
)


@tasks_app.callback()
def list_suites_command(context: typer.Context) -> None:
    """List the suites of tasks that can be named in `data.train_files`, and show their rows.

    Examples:

        agent-loop tasks

        agent-loop tasks show reasoning_gym

        agent-loop tasks show 'reasoning_gym:basic_arithmetic?seed=1&split=val'
    """
    if context.invoked_subcommand is not None:
        return
    from agent_loop.environments.tasks import SUITES, load_suite  # late: keeps `--help` quick

    table = Table(*(Column(name, overflow="fold") for name in ("suite", "tasks", "what", "reward")))
    missing: list[str] = []
    for name in sorted(SUITES):
        suite = load_suite(name)
        try:
            tasks = suite.tasks()
            count = str(len(tasks)) if suite.lists_tasks else "any"
        except ConfigError as error:
            count = "not installed"
            missing.append(str(error))
        table.add_row(name, count, suite.summary, ", ".join(suite.reward_parts))
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH_WITHOUT_TERMINAL
    console.print(table)
    for line in missing:
        print_line(console, line)
    print_line(console, "show the tasks of a suite with: agent-loop tasks show SUITE")


@tasks_app.command("show")
def show_tasks_command(
    name: Annotated[str, typer.Argument(help="A suite, or a task: suite:task?option=value.")],
) -> None:
    """Show the tasks of a suite, or three rows of a task, its tools and the parts of its reward.

    Examples:

        agent-loop tasks show reasoning_gym

        agent-loop tasks show 'reasoning_gym:basic_arithmetic?seed=1&split=val'
    """
    # late: keeps `--help` quick
    from agent_loop.environments.tasks import load_suite, parse_task_name, suite_rows

    console = Console()
    suite = load_suite(name.partition(":")[0])
    if ":" not in name:
        _show_suite(suite, console)
        return
    rows = list(islice(suite_rows(suite, parse_task_name(name, suite=suite)), NUM_ROWS))
    for number, row in enumerate(rows, start=1):
        console.print(f"row {number}", style="bold")
        for message in row["raw_prompt"]:
            print_line(console, f"{message['role']}: {_shortened(_text(message['content']))}")
        others = {key: value for key, value in row.items() if key != "raw_prompt"}
        print_line(console, _shortened(json.dumps(others, ensure_ascii=False, default=str)))
    _show_tools(suite, rows, console)
    _show_reward(suite, console)


def _show_suite(suite: TaskSuite, console: Console) -> None:
    for task in suite.tasks():
        print_line(console, f"{suite.name}:{task}")
    if not suite.lists_tasks:
        print_line(console, suite.summary)
    options = ["split (train or val)", *suite.options.model_fields]
    print_line(console, f"options: {', '.join(options)}")
    _show_reward(suite, console)


def _show_reward(suite: TaskSuite, console: Console) -> None:
    console.print("reward", style="bold")
    for part, meaning in suite.reward_parts.items():
        print_line(console, f"{part}: {meaning}")


def _show_tools(suite: TaskSuite, rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    console.print("tools", style="bold")
    if suite.agent_name != "environment_agent":
        print_line(console, f"those of the loop {suite.agent_name!r}")
        return
    schemas: Sequence[Mapping[str, Any]] = run_to_end(_tool_schemas(suite, rows[0])) if rows else []
    for schema in schemas:
        function = schema["function"]
        arguments = ", ".join(function.get("parameters", {}).get("properties", {}))
        print_line(console, f"{function['name']}({arguments}): {_shortened(function.get('description', ''))}")
    if not schemas:
        print_line(console, "none")


async def _tool_schemas(suite: TaskSuite, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the tools that the model of a row sees."""
    # late: keeps `--help` quick
    from agent_loop.environments.factory import EnvironmentFactory
    from agent_loop.environments.live import LiveEnvironment

    factory = EnvironmentFactory(suite.environment, where=f"environment {suite.name!r}")
    live = LiveEnvironment(factory, row=row)
    try:
        await live.open()
        return [tool.tool_schema for tool in (await live.tools()).values() if tool.is_shown]
    finally:
        await live.close()


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"
