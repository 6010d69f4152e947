"""`agent-loop check`: one command for each kind of object with a contract."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console
from rich.text import Text

from agent_loop.cli.arguments import (
    EXIT_FAILED,
    CheckTimeoutOption,
    ConfigArgument,
    JsonOption,
    ModelOption,
    OverridesArgument,
    finite,
    read_config,
)
from agent_loop.cli.verbosity import print_line
from agent_loop.config import Config, load_config, parse_section
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.files.plain_values import merge_overrides, parse_json, read_yaml, shown
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.event_loop import run_to_end

if TYPE_CHECKING:
    from agent_loop.checks import CheckReport, CheckResult
    from agent_loop.checks.tasks import TaskReport
    from agent_loop.interactions.base import BaseInteraction
    from agent_loop.tools.base import BaseTool
    from agent_loop.types import Row

CLOSE_TIMEOUT_S = 30.0
STYLES = {"passed": "green", "failed": "red", "skipped": "dim"}
check_app = typer.Typer(
    help="Check that a server, a tool or an interaction follows its contract, how a model may be computed, what "
    "isolates code on this machine, or that tasks can be used.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


class Printer:
    """Prints the results of checks as they end, and the counts of each report."""

    def __init__(self, *, as_json: bool) -> None:
        self.console = Console(stderr=as_json)
        self._as_json = as_json
        self._reports: list[CheckReport] = []

    def result(self, result: CheckResult) -> None:
        """Print a result on a line."""
        shown = f"{result.name} ({result.detail})" if result.detail else result.name
        self.console.print(
            Text(f"{result.verdict:8}", style=STYLES[result.verdict]), Text(shown), soft_wrap=True
        )

    async def report(self, checks: Awaitable[CheckReport]) -> None:
        """Run checks, and print how many passed, failed and were skipped."""
        report = await checks
        counts = [f"{len(report.named(verdict))} {verdict}" for verdict in ("passed", "failed", "skipped")]
        self.console.print(f"{report.subject}: {', '.join(counts)}")
        self._reports.append(report)

    def run(self, checks: Awaitable[CheckReport]) -> None:
        """Run checks of one object, and end the command."""
        run_to_end(self.report(checks))
        self.end()

    def end(self) -> None:
        """Print the JSON, and exit with code 1 if a check failed."""
        if self._as_json:
            results = {each.subject: list(map(asdict, each.results)) for each in self._reports}
            typer.echo(json.dumps(results, indent=2))
        if any(report.failures for report in self._reports):
            raise typer.Exit(EXIT_FAILED)


@check_app.command("server")
def check_server_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    model: ModelOption = None,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference/--no-reference",
            help="Also load the model with transformers, and compare tokens and log-probs with it.",
        ),
    ] = True,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0,
            callback=finite,
            help="Largest accepted difference of log-probs, in nats: 1e-3 for float32, 0.1 for bfloat16.",
        ),
    ] = 1e-3,
    timeout_s: CheckTimeoutOption = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Start one server of the configuration and check that it follows the contract of servers.

    The checks cover tokens, log-probs, stop reasons, abort, concurrency, sessions, invalid requests, sleep and weight
    updates. Checks of abilities that the server does not claim are skipped. The weights of the server are changed
    during the checks: do not run them on a server that others use. Exit code 1 if a check failed.

    Examples:

        agent-loop check server config.yaml

        agent-loop check server config.yaml rollout.engine=vllm

        agent-loop check server config.yaml rollout.engine=my_engine:MyServer --json
    """
    settings, printer = read_config(config, overrides, model=model), Printer(as_json=as_json)

    async def check() -> CheckReport:
        # late: keeps `--help` quick
        from agent_loop.checks import Reference, check_server, vocab_size_of
        from agent_loop.servers.factory import create_servers

        rollout = settings.rollout.model_copy(
            update={"num_servers": 1, "server_urls": settings.rollout.server_urls[:1]}
        )
        (server,) = create_servers(settings.model, rollout=rollout)
        path, trust = settings.model.path, settings.model.trust_remote_code
        loaded = Reference.load(path, trust_remote_code=trust) if reference else None
        try:
            await server.start()
            return await check_server(
                server,
                max_model_len=rollout.prompt_length + rollout.response_length,
                vocab_size=vocab_size_of(path, trust_remote_code=trust),
                reference=loaded,
                tolerance=tolerance,
                timeout_s=timeout_s,
                on_result=printer.result,
            )
        finally:
            await run_shielded(server.close, timeout_s=CLOSE_TIMEOUT_S)

    printer.run(check())


@check_app.command("model")
def check_model_command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder or hub name of the model.")],
    *,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Type to compute in; `auto` is that of the files."),
    ] = "auto",
    max_model_len: Annotated[
        int, typer.Option(min=32, help="Context in tokens. Attention windows that are shorter are crossed.")
    ] = 2048,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code of the model's folder.")] = False,
    timeout_s: CheckTimeoutOption = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Compare the caches of the embedded engine and the batches of the trainer with the model's plain forward.

    The engine and the trainer pick from a table of model types, which the tests of this package prove, and compute
    other types in the plain way. This command compares all ways for one model. Exit code 1 if a way that the table
    has for the type is not exact.

    Examples:

        agent-loop check model ./my_model

        agent-loop check model ./my_model --dtype float32 --max-model-len 512
    """
    # late: keeps `--help` quick
    from agent_loop.checks import check_model
    from agent_loop.servers.embedded.vision import auto_model_class

    printer = Printer(as_json=as_json)
    loader = auto_model_class(path, trust_remote_code=trust_remote_code)
    model = loader.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
    checks = check_model(model, max_model_len=max_model_len, timeout_s=timeout_s, on_result=printer.result)
    printer.run(checks)


@check_app.command("sandbox")
def check_sandbox_command(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the python tool.")
    ] = None,
    *,
    timeout_s: CheckTimeoutOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Check that this machine isolates the code of the python tool: one sandbox attempts what it must not do.

    Examples:

        agent-loop check sandbox

        agent-loop check sandbox python=/usr/bin/python3
    """
    # late: keeps `--help` quick
    from agent_loop.checks import check_sandbox
    from agent_loop.tools.sandbox.settings import SandboxSettings

    given = parse_section(SandboxSettings, merge_overrides({}, settings or ()), where="the settings given")
    printer = Printer(as_json=as_json)
    printer.run(check_sandbox(given, timeout_s=timeout_s, on_result=printer.result))


@check_app.command("tool")
def check_tool_command(
    tool: Annotated[
        str, typer.Argument(help="Name of a built-in tool, `module:Class` or `file.py:function`.")
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
    from agent_loop.checks import check_tool  # late: keeps `--help` quick

    printer = Printer(as_json=as_json)
    checks = check_tool(
        _load_tool(tool, config=config, name=name),
        calls=[_read_json(call, option="--call") for call in calls],
        create_kwargs=_read_json(create_kwargs, option="--create-kwargs"),
        execute_kwargs=_read_json(execute_kwargs, option="--execute-kwargs"),
        timeout_s=timeout_s,
        on_result=printer.result,
    )
    printer.run(checks)


def _load_tool(reference: str, *, config: Path | None, name: str | None) -> BaseTool:
    from agent_loop.tools.registry import ToolEntry, create_tools

    given: Any = {} if config is None else read_yaml(config, what="--config", resolve=True)
    if not isinstance(given, dict):
        raise ConfigError(f"{config} holds a list; give a file with the keys of one tool's entry")
    where = reference if config is None else str(config)
    entry = parse_section(ToolEntry, {"class_name": reference, **cast(dict[str, Any], given)}, where=where)
    tools = {tool.name: tool for tool in create_tools(entry, where=where)}
    if name is None and len(tools) > 1:
        raise ConfigError(
            f"{reference} defines {len(tools)} tools; choose one with --name: {', '.join(tools)}"
        )
    wanted = name or next(iter(tools))
    if wanted not in tools:
        raise ConfigError(f"{reference} defines no tool {wanted!r}{did_you_mean(wanted, tools)}")
    return tools[wanted]


def _read_json(text: str, *, option: str) -> Mapping[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{option} is {shown(text)}, which is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} is {shown(text)}; give a JSON object")
    return cast(Mapping[str, Any], value)


@check_app.command("interaction")
def check_interaction_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    name: Annotated[
        str | None, typer.Option("--name", help="Check only the interaction with this name.")
    ] = None,
    answers: Annotated[
        list[str] | None,
        typer.Option(
            "--answer",
            help="Message of the model. Give one per turn. By default a text, a number and a text.",
        ),
    ] = None,
    timeout_s: CheckTimeoutOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Check that the interactions of a configuration follow the contract of interactions.

    The checks cover replies, scores, isolation of trajectories, cancellation and clean-up. Checks that do not apply are
    skipped. Each interaction gets the arguments of the first row that names it. Exit code 1 if a check failed.

    Examples:

        agent-loop check interaction config.yaml

        agent-loop check interaction config.yaml --name gsm8k --answer "#### 41" --answer "#### 42"
    """
    settings, printer = read_config(config, overrides), Printer(as_json=as_json)

    async def check() -> None:
        from agent_loop.checks import check_interaction  # late: keeps `--help` quick

        rows = _first_rows(settings)
        for interaction in _select_interactions(settings, name=name):
            row, options = rows.get(interaction.name), dict[str, Any]()
            printer.console.print(
                f"[bold]{interaction.name}[/]" + ("" if row else " (no row of the data names it)")
            )
            if answers:
                options["answers"] = answers
            if row is not None:
                options |= {"interaction_kwargs": row["interaction_kwargs"], "prompt": row["raw_prompt"]}
            await printer.report(
                check_interaction(interaction, **options, timeout_s=timeout_s, on_result=printer.result)
            )

    run_to_end(check())
    printer.end()


def _select_interactions(config: Config, *, name: str | None) -> Sequence[BaseInteraction]:
    from agent_loop.interactions.registry import PATH_KEY, load_interactions

    interactions = load_interactions(config.rollout.multi_turn.interaction_config_path)
    if not interactions:
        raise ConfigError(f"the configuration has no interactions; give their file in {PATH_KEY}")
    if name is None:
        return list(interactions.values())
    if name not in interactions:
        raise ConfigError(f"there is no interaction {name!r}{did_you_mean(name, interactions)}")
    return [interactions[name]]


def _first_rows(config: Config) -> Mapping[str, Row]:
    """Return the first row that names each interaction. Empty if the configuration has no data."""
    from agent_loop.rollout.rows import load_rows

    data = config.data
    sources = [*data.train_files, *data.val_files]
    rows = load_rows(sources, prompt_key=data.prompt_key, workspace=data.workspace) if sources else []
    first: dict[str, Row] = {}
    for row in rows:
        kwargs: Mapping[str, Any] = row.get("interaction_kwargs") or {}
        first.setdefault(str(kwargs.get("name")), row)
    return first


@check_app.command("tasks")
def check_tasks_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PATH_OR_NAME",
            help="Folder of a task, or of several tasks, in Harbor's form; or a name, suite:task?option=value.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings that are merged over the workspaces of the tasks."
        ),
    ] = None,
    *,
    config: Annotated[
        Path | None, typer.Option("--config", help="Configuration whose `data.workspace` is merged too.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=1000, help="Number of tasks that are checked at once.")
    ] = 1,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Number of rows of a name to check.", show_default="all"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that the solution of every task scores 1, and that doing nothing scores 0.

    Each task of a folder runs its tests in two new containers: in one at once, in the other after the solution. Each
    row of a name is played twice, with one empty turn, which must score less than 1, and with the solution, if one is
    known. Exit code 1 if a task fails.

    Examples:

        agent-loop check tasks examples/tasks --concurrency 2

        agent-loop check tasks examples/tasks container.runtime=docker

        agent-loop check tasks examples/tasks/write-script container.build_args.BASE_IMAGE=debian-with-python

        agent-loop check tasks 'reasoning_gym:basic_arithmetic?size=100' --limit 20
    """
    # late: keeps `--help` quick
    from agent_loop.checks import CheckResult, check_tasks
    from agent_loop.environments.tasks import is_task_name

    printer = Printer(as_json=as_json)

    def show(report: TaskReport) -> None:
        rewards = ("-" if reward is None else f"{reward:g}" for reward in (report.nothing, report.solution))
        scores = "doing nothing scores {}, the solution {}".format(*rewards)
        verdict = "passed" if report.is_passed else "failed"
        printer.result(CheckResult(report.name, verdict, f"{scores}; {report.seconds:.1f} s"))
        for problem in report.problems:
            print_line(printer.console, f"{report.name}: {problem}", style="red")
        for ignored in report.ignored:
            print_line(printer.console, f"{report.name}: no effect: {ignored}")

    if is_task_name(source):
        from agent_loop.checks.solutions import check_named_tasks  # late: loads transformers

        if settings or config is not None:
            raise ConfigError(f"{source!r} has no workspace; leave out --config and KEY=VALUE")
        checks = check_named_tasks(source, limit=limit, concurrency=concurrency, on_report=show)
    elif limit is not None:
        raise ConfigError("--limit is for rows of a name, such as suite:task; leave it out")
    else:
        given: dict[str, Any] = {} if config is None else dict(load_config(config).data.workspace)
        given = merge_overrides(given, settings or ())
        checks = check_tasks(Path(source), settings=given, concurrency=concurrency, on_report=show)
    reports = run_to_end(checks)
    num_passed = sum(report.is_passed for report in reports)
    printer.console.print(f"{num_passed} of {len(reports)} tasks passed")
    if as_json:
        typer.echo(json.dumps(list(map(asdict, reports)), indent=2, default=str))
    if num_passed < len(reports):
        raise typer.Exit(EXIT_FAILED)
