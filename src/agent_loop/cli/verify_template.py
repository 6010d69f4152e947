"""`agent-loop verify-template`: what a chat template does to the tokens of a conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from agent_loop.cli.arguments import refuse_no_model
from agent_loop.errors import ChatTemplateError

if TYPE_CHECKING:
    from agent_loop.chat.report import ProbeResult, TemplateReport
    from agent_loop.chat.template import ChatTemplate

EXIT_UNSUPPORTED = 1
COLOURS = {"exact": "green", "differs": "yellow", "unsupported": "red"}


def verify_template_command(
    template: Annotated[
        str,
        typer.Argument(
            metavar="PATH_OR_NAME",
            help="A model folder, a hub name, or a template file (.jinja), which is tried with a makeshift tokenizer.",
            show_default=False,
        ),
    ],
    *,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            "--chat-template", help="Use this template file with the tokenizer.", show_default=False
        ),
    ] = None,
    tools: Annotated[
        bool, typer.Option("--tools/--no-tools", help="Try conversations with tools too.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compare the tokens of a trajectory with the template's own render of the same messages.

    Each probe is a short conversation: `exact` is token for token the same; `differs` names the cause, and the
    trajectory keeps what the model saw and said; `unsupported` shows the template's own error. Exit code 1 if the
    template cannot be used at all, or not with tools.

    Examples:

        agent-loop verify-template Qwen/Qwen3-4B

        agent-loop verify-template runs/train/checkpoints/step-000080/model --no-tools

        agent-loop verify-template Qwen/Qwen3-4B --chat-template my_template.jinja --json
    """
    from agent_loop.chat.verify import verify_template  # late: keeps `--help` quick

    try:
        report = verify_template(_load(template, chat_template), tools=tools)
    except ChatTemplateError as error:
        typer.echo(json.dumps({"verdict": "unsupported", "error": str(error)}) if as_json else str(error))
        raise typer.Exit(EXIT_UNSUPPORTED) from error
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
    else:
        _print(report, Console())
    if report.verdict == "unsupported":
        raise typer.Exit(EXIT_UNSUPPORTED)


def _load(template: str, chat_template: Path | None) -> ChatTemplate:
    from agent_loop.chat.makeshift import makeshift_tokenizer  # late: keeps `--help` quick
    from agent_loop.chat.template import ChatTemplate, load_chat_template

    path = Path(template)
    if path.is_file() and chat_template is None:
        return ChatTemplate(makeshift_tokenizer(path.read_text(encoding="utf-8")))
    refuse_no_model(template)
    return load_chat_template(
        template, chat_template_path=None if chat_template is None else str(chat_template)
    )


def _print(report: TemplateReport, console: Console) -> None:
    counts = [Column(name, justify="right") for name in ("adds", "keeps")]
    table = Table("probe", "verdict", "cause", *counts, box=box.SIMPLE_HEAD)
    for result in report.results:
        table.add_row(*_cells(result))
    console.print(table)
    console.print("adds: tokens between two turns of the model; keeps: tokens that a full render would lose.")
    console.print(Text("without tools: "), _coloured(report.without_tools), sep="")
    if report.with_tools is not None:
        console.print(Text("with tools: "), _coloured(report.with_tools), sep="")
    for cause in report.causes:
        console.print(f"{cause}: {cause.meaning}", markup=False, highlight=False)
        for result in report.results:
            if result.cause is cause and result.position is not None:
                console.print(f"  {_difference(result)}", markup=False, highlight=False)
    if report.verdict == "differs":
        console.print("History is never rendered again: a trajectory keeps what the model saw and said.")
    if report.has_date:
        console.print("The template writes today's date into the prompt; it is rendered once per trajectory.")
    for error in dict.fromkeys(result.error for result in report.results if result.error):
        console.print(error, markup=False, highlight=False)


def _difference(result: ProbeResult) -> str:
    """Where and how a probe's tokens differ first."""
    kept, rendered = (repr(text) if text else "nothing" for text in (result.kept, result.rendered))
    return f"{result.name}, token {result.position}: kept {kept}, full render {rendered}"


def _cells(result: ProbeResult) -> list[str | Text]:
    return [
        result.name,
        _coloured(result.verdict),
        result.cause or "",
        "" if result.error else str(result.num_bridge_tokens),
        "" if result.error else str(result.num_kept_tokens),
    ]


def _coloured(verdict: str) -> Text:
    return Text(str(verdict), style=COLOURS[str(verdict)])
