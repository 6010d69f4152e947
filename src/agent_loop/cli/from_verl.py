"""`agent-loop from-verl`: convert a launch script or a configuration of verl."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
import yaml

from agent_loop.config import Config, load_config
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import shown

if TYPE_CHECKING:
    from agent_loop.config.verl.translation import KeyReport

TITLES = {
    "not supported": "not supported; what to do",
    "unknown": "unknown to verl's trainer and to this package",
    "translated": "translated",
    "renamed": "renamed",
    "same": "same",
    "not needed": "not needed, and why",
}


def from_verl_command(
    source: Annotated[
        Path,
        typer.Argument(metavar="SCRIPT_OR_YAML", help="Launch script or configuration.", show_default=False),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Arguments of the script.", show_default=False),
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write; by default NAME.yaml in this folder.", show_default=False),
    ] = None,
    command: Annotated[
        int, typer.Option("--command", min=1, help="Which start of the trainer in the script to convert.")
    ] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
) -> None:
    """Convert a launch script or a configuration of verl to a configuration for `agent-loop train`.

    The script is read, and no program in it is run. The report has a line for each key: the same here, renamed,
    translated, not needed and why, or not supported and what to do. Defaults of verl that differ from those of this
    package are written too.

    Examples:

        agent-loop from-verl run_qwen2.5-3b_gsm8k_multiturn.sh

        agent-loop from-verl run_qwen3_8b.sh trainer.n_gpus_per_node=4 --out config.yaml

        MODEL_PATH=models/small agent-loop from-verl run_grpo.sh

        agent-loop from-verl outputs/2026-11-01/.hydra/config.yaml --out config.yaml
    """
    # late: keeps `--help` quick
    from agent_loop.config.verl.conversion import convert
    from agent_loop.config.verl.launch import read_launches

    environment = {**os.environ, "PWD": os.getcwd()}
    launches = read_launches(source, arguments=arguments or (), environment=environment)
    if command > len(launches):
        raise ConfigError(f"--command is {command}, but the script starts the trainer {len(launches)} times")
    target = out or Path(f"{source.stem}.yaml")
    if target.exists() and not overwrite:
        raise ConfigError(f"{str(target)!r} exists; give --out with another name, or --overwrite")
    launch = launches[command - 1]
    conversion = convert(launch)
    notes = list(conversion.notes)
    if len(launches) > 1:
        notes.append(f"the script starts the trainer {len(launches)} times; --command selects one")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_yaml(conversion.settings, source=source), encoding="utf-8")
    for line in report_lines(conversion.reports, defaults=conversion.defaults, notes=notes):
        typer.echo(line)
    load_config(target)
    typer.echo(f"wrote {target}; start it with: agent-loop train {target}{_resume(conversion.reports)}")


def report_lines(
    reports: Sequence[KeyReport], *, defaults: Sequence[KeyReport] = (), notes: Sequence[str] = ()
) -> list[str]:
    """Return the lines of a report, by status."""
    counts = Counter(report.status for report in reports)
    found = [f"{counts[status]} {status}" for status in TITLES if counts[status]]  # pyright: ignore[reportArgumentType]
    lines = [f"{len(reports)} keys: {', '.join(found)}"]
    for status, title in TITLES.items():
        chosen = [report for report in reports if report.status == status]
        if chosen:
            lines += ["", title, *(f"  {_line(report)}" for report in chosen)]
    if defaults:
        lines += ["", "defaults of verl", *(f"  {_line(report)}" for report in defaults)]
    if notes:
        lines += ["", "notes", *(f"  {note}" for note in notes)]
    return [*lines, ""]


def _line(report: KeyReport) -> str:
    if report.status == "not supported" and report.note.startswith(report.key):
        return report.note
    settings = ", ".join(f"{key}: {shown(value)}" for key, value in report.settings.items())
    if report.status in ("same", "unknown") or not settings:
        text = f"{report.key}={shown(report.value)}"
    elif report.status == "renamed":
        text = f"{report.key} is {settings}"
    else:
        text = f"{report.key}={shown(report.value)} is {settings}"
    return f"{text}: {report.note}" if report.note else text


def _resume(reports: Sequence[KeyReport]) -> str:
    given = {report.key: report.value for report in reports}
    if given.get("trainer.resume_from_path"):
        return f" --resume-from {given['trainer.resume_from_path']}"
    return "" if given.get("trainer.resume_mode") == "disable" else " --resume"


def _yaml(settings: Mapping[str, Any], *, source: Path) -> str:
    ordered = {name: settings[name] for name in Config.model_fields if name in settings}
    return f"# Converted from {source.name} by agent-loop from-verl.\n" + yaml.safe_dump(
        _plain(ordered), sort_keys=False, allow_unicode=True
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in cast(Sequence[Any], value)]
    return value
