"""Arguments that several commands share, and the rows and servers they name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from agent_loop.config import MAX_SAMPLES, Config, load_config
from agent_loop.errors import ConfigError

ConfigArgument = Annotated[Path, typer.Argument(help="YAML file.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Settings that replace those of the file.", show_default=False
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", help="Use this model folder or hub name in place of `model.path`.", show_default=False
    ),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data", help="Row files, or file.py:function; may be given more than once.", show_default=False
    ),
]
RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="Folder of a run, or Parquet file of trajectories.", show_default=False
    ),
]
StepOption = Annotated[int | None, typer.Option("--step", min=0, help="Only this step.", show_default=False)]
SplitOption = Annotated[
    str | None, typer.Option("--split", help="Only `train`, `val`, `eval` or `rollout`.", show_default=False)
]
MaxRowsOption = Annotated[int | None, typer.Option("--max-rows", min=1, help="Only the first so many rows.")]
SamplesOption = Annotated[
    int | None, typer.Option("-n", min=1, max=MAX_SAMPLES, help="Trajectories per row.")
]


def read_config(path: Path, overrides: Sequence[str] | None, *, model: str | None = None) -> Config:
    """The configuration with its overrides.

    Raises:
        ConfigError: It is missing or wrong.
    """
    extra = [] if model is None else [f"model.path={model}"]
    return load_config(path, overrides=[*(overrides or []), *extra])


def read_rows(config: Config, *, data: Sequence[str] | None, max_rows: int | None) -> list[dict[str, Any]]:
    """The rows to run: those given, else the validation rows, else the training rows.

    Raises:
        ConfigError: None are named.
        DataError: A file or a row is wrong.
    """
    sources = list(data or config.data.val_files or config.data.train_files)
    if not sources:
        raise ConfigError("there are no rows: set data.val_files or data.train_files, or give --data")
    return load_named_rows(config, sources, max_rows=max_rows)


def load_named_rows(config: Config, sources: Sequence[str], *, max_rows: int | None) -> list[dict[str, Any]]:
    """Return the rows of these files.

    Raises:
        DataError: A file or a row is wrong.
    """
    from agent_loop.rollout.rows import load_rows  # late: keeps `--help` quick

    return load_rows(sources, prompt_key=config.data.prompt_key)[: max_rows or config.data.val_max_rows]
