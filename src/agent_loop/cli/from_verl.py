"""`agent-loop from-verl`: convert settings of verl's trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
import yaml

from agent_loop.config import Config, parse_section
from agent_loop.config.verl.combined import ENGINES
from agent_loop.config.verl.rows import value_at
from agent_loop.config.verl.translation import (
    GPU_DEFAULTS,
    VERL_DEFAULTS,
    Report,
    Translation,
    nested,
    translate,
)
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import merge_mappings, parse_override, read_yaml, shown

TITLES = {
    "not supported": "not supported; what to do",
    "unknown": "unknown to verl's trainer and to this package",
    "different": "different from verl",
    "taken over": "taken over",
    "not needed": "not needed, and why",
}


def from_verl_command(
    given: Annotated[
        list[str], typer.Argument(metavar="[YAML]... [KEY=VALUE]...", help="Settings of verl's trainer.")
    ],
    *,
    out: Annotated[Path, typer.Option("--out", help="File to write.")] = Path("config.yaml"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
) -> None:
    """Convert settings of verl's trainer to a configuration for `agent-loop train`.

    Give the arguments of the trainer, or the YAML that Hydra prints with `--cfg job --resolve`. The report says what
    became of each key. Defaults of verl that differ from those of this package are written too.

    Examples:

        agent-loop from-verl actor_rollout_ref.model.path=models/small data.train_batch_size=64

        python3 -m verl.trainer.main_ppo ... --cfg job --resolve > job.yaml && agent-loop from-verl job.yaml
    """
    if out.exists() and not overwrite:
        raise ConfigError(f"{str(out)!r} exists; give --out with another name, or --overwrite")
    found = convert(given)
    config = parse_section(Config, found.settings, where="from-verl", names=found.names)
    ordered = {name: found.settings[name] for name in Config.model_fields if name in found.settings}
    out.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)
    out.write_text(f"# Converted from settings of verl by agent-loop from-verl.\n{text}", encoding="utf-8")
    for line in report_lines(found.reports):
        typer.echo(line)
    typer.echo(f"Rows without agent_name run {config.rollout.default_agent_loop}.")
    typer.echo(f"wrote {out}; start it with: agent-loop train {out}")


def convert(given: Sequence[str]) -> Translation:
    """Return the settings of this package for settings of verl's trainer and for its defaults.

    Args:
        given: YAML files, and `key=value` arguments.
    """
    tree: dict[str, Any] = {}
    for each in given:
        tree = merge_mappings(tree, _read(each))
    engine = value_at(tree, ("actor_rollout_ref", "rollout", "name"))
    defaults = {**VERL_DEFAULTS, **(GPU_DEFAULTS if engine in ENGINES else {})}
    return translate([nested(defaults), tree], where="from-verl")


def _read(given: str) -> Mapping[str, Any]:
    if given.endswith((".yaml", ".yml")) and "=" not in given:
        values: Any = read_yaml(given, what="config file")
        if isinstance(values, Mapping) and "actor_rollout_ref" in values:
            return cast(Mapping[str, Any], values)
        raise ConfigError(f"{given!r} is not a configuration of verl: it has no section actor_rollout_ref")
    if "=" not in given:
        raise ConfigError(
            f"{given!r} is neither a YAML file nor key=value; docs/from-verl.md shows how to print the arguments of a "
            "launch script"
        )
    return parse_override(given.lstrip("+"))


def report_lines(reports: Sequence[Report]) -> list[str]:
    """Return the lines of a report, by status. Keys without effect and with the same note share a line."""
    given = [report for report in reports if report.source]
    counts = Counter(report.status for report in given for _ in report.given)
    found = [f"{counts[status]} {status}" for status in TITLES if counts[status]]  # pyright: ignore[reportArgumentType]
    lines = [f"{counts.total()} keys: {', '.join(found)}"]
    for status, title in TITLES.items():
        lines += _section(title, [report for report in given if report.status == status])
    return [*lines, *_section("defaults of verl", [report for report in reports if not report.source]), ""]


def _section(title: str, reports: Sequence[Report]) -> list[str]:
    lines: list[str] = []
    without_effect: dict[str, list[str]] = {}
    for report in reports:
        values = ", ".join(f"{key}={shown(value)}" for key, value in report.given.items())
        settings = ", ".join(f"{key}: {shown(value)}" for key, value in report.settings.items())
        if report.status in ("not needed", "different"):
            without_effect.setdefault(report.note, []).append(values)
        elif report.status == "not supported":
            lines.append(report.note)
        else:
            is_same = report.settings == report.given
            lines.append(
                values + ("" if is_same else f" is {settings}") + (f" ({report.note})" if report.note else "")
            )
    lines += [f"{note}: {', '.join(values)}" for note, values in without_effect.items()]
    return ["", title, *(f"  {line}" for line in lines)] if lines else []
