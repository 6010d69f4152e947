"""`agent-loop check-tool`: does a tool keep its contract?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from agent_loop.cli.arguments import CheckTimeoutOption
from agent_loop.cli.checking import EXIT_FAILED, print_counts, printer
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
            help="A short name of the kit, `module:Class` or `file.py:function`.", show_default=False
        ),
    ],
    *,
    calls: Annotated[
        list[str],
        typer.Option("--call", help="Arguments of a call that works, as JSON; give it once per call."),
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", help="YAML with the entry's other keys: config, tool_schema, ..."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Check this one, where the entry makes several tools.")
    ] = None,
    create_kwargs: Annotated[
        str, typer.Option("--create-kwargs", help="What a row gives to `create`, as JSON.")
    ] = "{}",
    execute_kwargs: Annotated[
        str, typer.Option("--execute-kwargs", help="What a row gives to `execute`, as JSON.")
    ] = "{}",
    timeout_s: CheckTimeoutOption = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Try every sentence of the contract on a tool.

    Answers, rewards, isolation of trajectories, odd arguments, cancellation and clean-up; a sentence that does not
    apply is skipped. Every call is run for real, a hundred or so in all. Exit code 1 if a check failed.

    Examples:

        agent-loop check-tool calculator --call '{"expression": "1 + 1"}'

        agent-loop check-tool my_tools:Weather --config weather.yaml --call '{"city": "Ulm"}'
    """
    from agent_loop.tools.check import check_tool  # late: keeps `--help` quick

    console = Console(stderr=as_json)
    report = run_to_end(
        check_tool(
            _load(tool, config=config, name=name),
            calls=[_read_json(call, option="--call") for call in calls],
            create_kwargs=_read_json(create_kwargs, option="--create-kwargs"),
            execute_kwargs=_read_json(execute_kwargs, option="--execute-kwargs"),
            timeout_s=timeout_s,
            on_result=printer(console),
        )
    )
    print_counts(report, console)
    if as_json:
        typer.echo(json.dumps([asdict(result) for result in report.results], indent=2))
    if report.failures:
        raise typer.Exit(EXIT_FAILED)


def _load(reference: str, *, config: Path | None, name: str | None) -> BaseTool:
    from agent_loop.tools.registry import ToolEntry, make_tools

    where = reference if config is None else str(config)
    given: Mapping[str, Any] = {} if config is None else _read_yaml(config)
    entry = parse_section(ToolEntry, {"class_name": reference, **given}, where=where)
    tools = {tool.name: tool for tool in make_tools(entry, where=where)}
    if name is None:
        name = _only(list(tools), reference=reference)
    if name not in tools:
        raise ConfigError(f"{reference} makes no tool {name!r}{did_you_mean(name, tools)}")
    return tools[name]


def _only(names: Sequence[str], *, reference: str) -> str:
    if len(names) > 1:
        raise ConfigError(f"{reference} makes {len(names)} tools; choose one with --name: {', '.join(names)}")
    return names[0]


def _read_json(text: str, *, option: str) -> Mapping[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{option} is {shown(text)}, which is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} is {shown(text)}; give a JSON object")
    return cast(Mapping[str, Any], value)


def _read_yaml(path: Path) -> Mapping[str, Any]:
    content = read_yaml(path, what="--config", resolve=True)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a list; give the keys of one tool's entry")
    return cast(Mapping[str, Any], content)
