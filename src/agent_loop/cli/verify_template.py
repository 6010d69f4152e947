"""`agent-loop verify-template`: compare the tokens of a trajectory with the template's own render."""

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
from agent_loop.cli.verbosity import print_line
from agent_loop.errors import ChatTemplateError, ConfigError

if TYPE_CHECKING:
    from agent_loop.chat.template import ChatTemplate
    from agent_loop.chat.verify import CauseKind, RenderDifference, TemplateReport

EXIT_UNSUPPORTED = 1
EXIT_LEFT_OUT = 3  # (2 is a wrong argument)
COLOURS = {
    "exact": "green",
    "differs": "yellow",
    "unsupported": "red",
    "left_out": "bold red",
    "rewritten": "yellow",
    "merged": "yellow",
}


def verify_template_command(
    template: Annotated[
        str,
        typer.Argument(
            metavar="PATH_OR_NAME",
            help="Model folder, hub name, or template file (.jinja), which gets a placeholder tokenizer.",
        ),
    ],
    *,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", help="Template file to use with the tokenizer.")
    ] = None,
    tools: Annotated[
        bool, typer.Option("--tools/--no-tools", help="Also verify conversations with tools.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compare the tokens of a trajectory with the template's own render of the same messages.

    Each probe is a short conversation. `exact`: all tokens are the same. `differs`: every cause is printed with an
    example. `unsupported`: the template's error is printed. There are three kinds of differences: something is left
    out, history is rewritten, or tokens are merged where turns meet.

    Exit codes: 0 if the template is exact, or if it only rewrites history or merges tokens, which does not affect
    trajectories; 1 if the template cannot be used at all, or not with tools; 3 if it leaves out tool schemas, the
    system prompt or tool calls; 2 for a wrong argument.

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
    if "left_out" in report.kinds():
        raise typer.Exit(EXIT_LEFT_OUT)


def _load(template: str, chat_template: Path | None) -> ChatTemplate:
    from agent_loop.chat.placeholder_tokenizer import placeholder_tokenizer  # late: keeps `--help` quick
    from agent_loop.chat.template import ChatTemplate, load_chat_template

    path = Path(template)
    if path.is_file() and chat_template is None:
        return ChatTemplate(placeholder_tokenizer(path.read_text(encoding="utf-8")))
    if path.suffix == ".jinja" and not path.is_file():
        raise ConfigError(f"template file {template!r} does not exist; give the path of a file")
    refuse_no_model(template)
    return load_chat_template(
        template, chat_template_path=None if chat_template is None else str(chat_template)
    )


def _print(report: TemplateReport, console: Console) -> None:
    left_out = [kind for kind in report.kinds() if str(kind) == "left_out"]
    for kind in left_out:  # (the most serious kind comes first)
        _print_kind(report, kind, console)
    counts = [Column(name, justify="right") for name in ("adds", "keeps")]
    table = Table(Column("probe", no_wrap=True), "verdict", "causes", *counts, box=box.SIMPLE_HEAD)
    for result in report.results:
        numbers = ("", "") if result.error else (str(result.num_bridge_tokens), str(result.num_kept_tokens))
        table.add_row(result.name, _coloured(result.verdict), ", ".join(result.causes), *numbers)
    console.print(table)
    console.print(
        "adds: tokens between turns of the model; keeps: sampled tokens that a full render would lose."
    )
    verdicts = {"without tools": report.without_tools, "with tools": report.with_tools}
    for name, verdict in verdicts.items():
        if verdict is not None:
            kinds = ", ".join(report.kinds(tools=name == "with tools"))
            console.print(Text(f"{name}: ") + _coloured(verdict) + Text(f" ({kinds})" if kinds else ""))
    for kind in report.kinds()[len(left_out) :]:
        _print_kind(report, kind, console)
    if report.has_date:
        console.print("The template writes today's date into the prompt, once per trajectory.")
    if not report.has_reasoning:
        console.print("The template writes no reasoning; the verdict holds for models without reasoning.")
    for error in dict.fromkeys(result.error for result in report.results if result.error):
        print_line(console, error)


def _print_kind(report: TemplateReport, kind: CauseKind, console: Console) -> None:
    """Print the causes of a kind, each with its first example."""
    console.print(Text(f"{kind}: {kind.meaning}", style=COLOURS[str(kind)]))
    for cause in report.causes:
        if cause.kind is kind:
            (result, difference), *others = report.examples(cause)
            more = f" (and {len(others)} more)" if others else ""
            print_line(console, f"  {cause}: {cause.meaning}")
            print_line(console, f"    {result.name}{more}: {_shown(difference)}")


def _shown(difference: RenderDifference) -> str:
    kept, rendered = (repr(text) if text else "nothing" for text in (difference.kept, difference.rendered))
    if difference.is_in_no_render:
        return f"{kept} is in no render"
    return f"kept {kept}, full render {rendered}"


def _coloured(verdict: str) -> Text:
    return Text(str(verdict), style=COLOURS[str(verdict)])
