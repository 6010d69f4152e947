"""`agent-loop check tool`: check a tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from agent_loop.cli.check.options import EXIT_FAILED, CheckTimeoutOption, JsonOption
from agent_loop.config import parse_section
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.files.plain_values import parse_json, read_yaml, shown
from agent_loop.runtime.event_loop import run_to_end

if TYPE_CHECKING:
    from agent_loop.tools.base import BaseTool


def check_tool_command(
    tool: Annotated[
        str,
        typer.Argument(
            help="Name of a built-in tool, `module:Class` or `file.py:function`.", show_default=False
        ),
    ],
    *,
    calls: Annotated[
        list[str],
        typer.Option(
            "--call", help="Arguments of a call that succeeds, as JSON. May be given more than once."
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", help="YAML file with the other keys of the tool's entry: config, tool_schema, ..."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Tool to check if the entry defines several.")
    ] = None,
    create_kwargs: Annotated[
        str, typer.Option("--create-kwargs", help="Arguments of `create` that a row gives, as JSON.")
    ] = "{}",
    execute_kwargs: Annotated[
        str, typer.Option("--execute-kwargs", help="Arguments of `execute` that a row gives, as JSON.")
    ] = "{}",
    timeout_s: CheckTimeoutOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Check that a tool follows the contract of tools.

    The checks cover responses, rewards, isolation of trajectories, unusual arguments, cancellation and clean-up. Checks
    that do not apply are skipped. The tool is really called, about a hundred times. Exit code 1 if a check failed.

    Examples:

        agent-loop check tool calculator --call '{"expression": "1 + 1"}'

        agent-loop check tool my_tools:Weather --config weather.yaml --call '{"city": "Ulm"}'
    """
    # late: keeps `--help` quick
    from agent_loop.checks import check_tool
    from agent_loop.testing.rendering import print_counts, reports_as_json, result_printer

    console = Console(stderr=as_json)
    report = run_to_end(
        check_tool(
            _load(tool, config=config, name=name),
            calls=[_read_json(call, option="--call") for call in calls],
            create_kwargs=_read_json(create_kwargs, option="--create-kwargs"),
            execute_kwargs=_read_json(execute_kwargs, option="--execute-kwargs"),
            timeout_s=timeout_s,
            on_result=result_printer(console),
        )
    )
    print_counts(report, console)
    if as_json:
        typer.echo(reports_as_json([report]))
    if report.failures:
        raise typer.Exit(EXIT_FAILED)


def _load(reference: str, *, config: Path | None, name: str | None) -> BaseTool:
    from agent_loop.tools.registry import ToolEntry, create_tools

    where = reference if config is None else str(config)
    given: Mapping[str, Any] = {} if config is None else _read_yaml(config)
    entry = parse_section(ToolEntry, {"class_name": reference, **given}, where=where)
    tools = {tool.name: tool for tool in create_tools(entry, where=where)}
    if name is None:
        name = _only(list(tools), reference=reference)
    if name not in tools:
        raise ConfigError(f"{reference} defines no tool {name!r}{did_you_mean(name, tools)}")
    return tools[name]


def _only(names: Sequence[str], *, reference: str) -> str:
    if len(names) > 1:
        raise ConfigError(
            f"{reference} defines {len(names)} tools; choose one with --name: {', '.join(names)}"
        )
    return names[0]


def _read_json(text: str, *, option: str) -> Mapping[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{option} is {shown(text)}, which is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} is {shown(text)}; give a JSON object")
    return cast(Mapping[str, Any], value)


def _read_yaml(path: Path) -> Mapping[str, Any]:
    content = read_yaml(path, what="--config", resolve=True)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a list; give a file with the keys of one tool's entry")
    return cast(Mapping[str, Any], content)
