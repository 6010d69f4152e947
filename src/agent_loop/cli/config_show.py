"""`agent-loop config show`: print the settings of a run, and where each value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, cast

import typer
import yaml
from rich.console import Console

from agent_loop.cli.arguments import ConfigArgument, OverridesArgument, read_config
from agent_loop.cli.verbosity import print_line
from agent_loop.config import Config

MAX_WIDTH = 60
"""Column in which the sources begin, if no line is longer."""
config_app = typer.Typer(
    help="Show the settings of a run.", no_args_is_help=True, rich_markup_mode="markdown"
)


@config_app.command("show")
def config_show_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Print the settings that have their default value too.")
    ] = False,
) -> None:
    """Print the settings of a run, one per line, and where each value comes from.

    The keys are those of the command line. Settings that have their default value are left out.

    Examples:

        agent-loop config show config.yaml

        agent-loop config show config.yaml rollout.n=4 --all
    """
    stages = {
        "default": _flat(Config()),
        str(config): _flat(read_config(config, None)),
        "command line": _flat(read_config(config, overrides)),
    }
    found = stages["command line"]
    sources = {key: _source(key, stages) for key in found}
    lines = {
        f"{key}={_text(value)}": sources[key]
        for key, value in found.items()
        if everything or sources[key] != "default"
    }
    width = min(max(map(len, lines), default=0), MAX_WIDTH)
    console = Console(soft_wrap=True)
    for line, source in lines.items():
        print_line(console, f"{line.ljust(width)}  # {source}")


def _source(key: str, stages: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the last stage in which the value of a key changed."""
    source, before = "default", stages["default"].get(key)
    for name, values in stages.items():
        if values.get(key) != before:
            source, before = name, values.get(key)
    return source


def _flat(config: Config) -> dict[str, Any]:
    return dict(_leaves(config.model_dump(mode="json"), prefix=""))


def _leaves(values: Mapping[str, Any], *, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings by their dotted keys. Empty mappings are values."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(cast("dict[str, Any]", value), prefix=f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: Any) -> str:
    """Return a value as the command line accepts it."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
        .removesuffix("\n...\n")
        .strip()
    )
