"""Arguments and options that several commands share, and the loading of what they name."""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from agent_loop.config import MAX_SAMPLES, Config, load_config
from agent_loop.errors import CheckpointError, ConfigError, DataError
from agent_loop.files.file_kinds import (
    CHECKPOINT,
    MODEL,
    RECORDS,
    SAVED_DATASET,
    SETTINGS,
    STORED_TRAJECTORIES,
    explain,
    kind_of,
    model_in,
    only_run,
    runs_in,
)
from agent_loop.storage.json_lines import stored_copy
from agent_loop.storage.run import StoredRun

WIDTH_WITHOUT_TERMINAL = 160
"""Characters per line of tables if the output is not a terminal."""


def finite(value: float | None) -> float | None:
    """Refuse an option that is infinite or not a number. A callback of options."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


ConfigArgument = Annotated[Path, typer.Argument(help="YAML file.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace those of the file."),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Resume the run in `trainer.run_dir`, even after a crash. Starts a new run if there is none.",
    ),
]
ResumeFromOption = Annotated[
    Path | None,
    typer.Option(
        "--resume-from", help="Resume from this checkpoint, or from the last checkpoint of this run."
    ),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Remove the files of an earlier run in `trainer.run_dir`.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Use this model folder or hub name in place of `model.path`.")
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="Rows: files, folders or globs of them, a folder saved by `datasets` (folder:split), the name of a task "
        "(suite:task?option=value), or file.py:function; may be given more than once.",
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or file of trajectories.")]
WhereOption = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        help="Only trajectories with this condition, as in `reward<1`. May be given more than once; all must hold.",
    ),
]
StepOption = Annotated[int | None, typer.Option("--step", min=0, help="Only this step.")]
SplitOption = Annotated[str | None, typer.Option("--split", help="Only `train`, `val`, `eval` or `rollout`.")]
JsonLinesOption = Annotated[
    bool,
    typer.Option("--jsonl", help="Write JSON lines with the columns of the Parquet files, one value each."),
]
HostOption = Annotated[str, typer.Option("--host", help="Address to listen on.")]
PortOption = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 is any free port.")
]
AllowedHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        metavar="NAME",
        help="Host name that clients may use in addition to --host and localhost. May be given more than once.",
    ),
]
EXIT_BY_SIGNAL = 128
"""Exit code of a command that a signal ends, without the number of the signal."""
EXIT_FAILED = 1
"""Exit code of a command that finds something wrong."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
CheckTimeoutOption = Annotated[
    float, typer.Option(min=0, callback=finite, help="Time limit of each check, in seconds.")
]
MaxRowsOption = Annotated[int | None, typer.Option("--max-rows", min=1, help="Maximum number of rows.")]
SamplesOption = Annotated[
    int | None, typer.Option("-n", min=1, max=MAX_SAMPLES, help="Trajectories per row.")
]


WANTED_RUN = "the folder of a run, or a file of trajectories"
JSON_LINES = frozenset({".jsonl", ".ndjson", ".json"})
"""Ends of the names of files that are written as JSON lines."""


def find_run(path: Path) -> Path:
    """Return the run at a path: the path itself, or the only run in that folder.

    The trajectories of JSON lines are copied to a Parquet file, which is removed when the process ends.
    """
    path = only_run(path)
    kind = kind_of(path)
    if kind is RECORDS:
        folder = tempfile.mkdtemp(prefix="agent-loop-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return stored_copy(path, folder=Path(folder))
    is_other = kind in (CHECKPOINT, MODEL, SAVED_DATASET) or (
        path.is_file() and kind is not STORED_TRAJECTORIES
    )
    if is_other or not path.exists() or (kind is None and len(runs_in(path)) > 1):
        raise DataError(explain(path, wanted=WANTED_RUN))
    return path


def find_checkpoint_source(path: Path) -> Path:
    """Return the checkpoint or the run at a path, or the only run in that folder."""
    if not path.is_dir() or kind_of(path) is SAVED_DATASET:
        raise CheckpointError(explain(path, wanted="a checkpoint, or the folder of a training run"))
    return only_run(path)


def refuse_no_model(name: str) -> None:
    """Refuse a file or a folder that is not a model. Any other name may be a hub name."""
    path = Path(name)
    if path.is_file() or (path.is_dir() and kind_of(path) is not MODEL):
        model = model_in(path)
        such_as = f", such as {str(model)!r}" if model is not None else ""
        raise ConfigError(explain(path, wanted=f"the folder of a model{such_as}"))


def nothing_stored(stored: StoredRun, *, step: int | None, split: str | None) -> DataError:
    """Return an error for a step or split without trajectories. The error lists the stored steps and splits."""
    keys: Any = stored.scalars(columns=("step", "split")).to_pylist()
    steps: dict[str, set[int]] = {}
    for key in keys:
        steps.setdefault(key["split"], set()).add(key["step"])
    wanted = " ".join(filter(None, (split, None if step is None else f"step {step}"))) or "any step"
    available = ", ".join(f"{name}: step {_ranges(numbers)}" for name, numbers in sorted(steps.items()))
    return DataError(
        f"{str(stored.path)!r} holds no trajectories of {wanted}; there are {available or 'none at all'}"
    )


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as `1 to 20, 40`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join(" to ".join(map(str, run)) for run in runs)


def read_config(path: Path, overrides: Sequence[str] | None, *, model: str | None = None) -> Config:
    """Return the configuration in a file, with overrides."""
    kind = kind_of(path)
    if kind not in (None, SETTINGS):
        raise ConfigError(explain(path, wanted="a YAML file of settings"))
    extra = [] if model is None else [f"model.path={model}"]
    return load_config(path, overrides=[*(overrides or []), *extra])


def read_rows(config: Config, *, data: Sequence[str] | None, max_rows: int | None) -> list[dict[str, Any]]:
    """Return the rows of `data`, else the validation rows, else the training rows."""
    sources = list(data or config.data.val_files or config.data.train_files)
    if not sources:
        raise ConfigError("there are no rows: set data.val_files or data.train_files, or give --data")
    return load_named_rows(config, sources, max_rows=max_rows)


def load_named_rows(config: Config, sources: Sequence[str], *, max_rows: int | None) -> list[dict[str, Any]]:
    """Return the rows of these files."""
    from agent_loop.rollout.rows import load_rows  # late: keeps `--help` quick

    data = config.data
    rows = load_rows(sources, prompt_key=data.prompt_key, workspace=data.workspace)
    return rows[: max_rows or data.val_max_rows]
