"""Kinds of files and folders that this package reads and writes, for errors about a path of the wrong kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from agent_loop.errors import OutputError
from agent_loop.files.plain_values import parse_json

MAX_LINE = 1 << 24
"""Number of bytes that are read of a first line. Lines of long trajectories have megabytes."""
PARQUET_MAGIC = b"PAR1"
ARROW_MAGIC = b"ARROW1"
JOURNAL_MAGIC = b"agent-loop journal"
TRACE_START = b'{"version":'
STORED = b"agent_loop.schema_version"
"""Metadata key of Parquet files that hold trajectories."""
STATE_FILE = "state.json"
"""File in a checkpoint, and in a folder saved by `datasets`, which also has `DATASET_FILE`."""
DATASET_FILE = "dataset_info.json"
DATASET_DICT_FILE = "dataset_dict.json"
SEARCHED_DEPTH = 3
"""Levels of folders below a path that are searched for runs."""
NOT_SEARCHED = frozenset({"checkpoints", "trajectories", "workspaces"})
"""Folders of a run that hold no runs."""


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file or folder, and the commands that read it."""

    what: str
    """Description that completes the sentence "it is ..."."""
    read_by: str
    """The commands that read it."""


RUN = FileKind(
    "the folder of a training run", "`agent-loop show`, `view`, `compare`, `rescore`, `replay` and `export`"
)
EVALUATION = FileKind(
    "the folder of an evaluation", "`agent-loop show`, `view`, `rescore` and `eval --compare`"
)
CHECKPOINT = FileKind("a checkpoint", "`agent-loop export`, `eval --checkpoint` and `train --resume-from`")
MODEL = FileKind("the folder of a model", "`agent-loop serve`, `verify-template` and the setting model.path")
STORED_TRAJECTORIES = FileKind(
    "a Parquet file of trajectories", "`agent-loop show`, `view`, `rescore` and `replay`"
)
OTHER_PARQUET = FileKind(
    "a Parquet file without trajectories", "`agent-loop rollout --data`, if it holds rows"
)
DAMAGED_PARQUET = FileKind(
    "a Parquet file that is damaged or was cut off",
    "no command: copy it again, or move it away to read the others",
)
RECORDS = FileKind(
    "a file of trajectories as JSON lines",
    "`agent-loop show`, `view`, `rescore` and `replay`",
)
TRACES = FileKind("a file of traces", "`agent-loop traces`")
METRICS = FileKind("the metrics of a run", "`agent-loop view`, given the folder that it is in")
SAVED_DATASET = FileKind("a folder saved by `datasets`", "`agent-loop rollout --data` and `eval --data`")
ROWS = FileKind("a file of rows", "`agent-loop rollout --data` and `eval --data`")
JOURNAL = FileKind(
    "the journal of a rollout that did not end", "`agent-loop rollout --resume`, given its `--out`"
)
SETTINGS = FileKind("a YAML file of settings", "`agent-loop train`, `rollout` and `eval`")


def explain(path: Path, *, wanted: str) -> str:
    """Return an error message for a path of the wrong kind: its kind, the command that reads it, and what to give.

    Args:
        wanted: What to give instead, such as `the folder of a run`.
    """
    named = repr(str(path))
    if not path.exists():
        return f"{named} does not exist; give {wanted}"
    kind = kind_of(path)
    if kind is not None:
        return f"{named} is {kind.what} (read by {kind.read_by}); give {wanted}"
    runs = runs_in(path)
    if runs:
        return f"{named} is a folder of runs; give one of them: {', '.join(map(str, runs))}"
    return f"{named} is a {'folder' if path.is_dir() else 'file'} of another kind; give {wanted}"


def refuse_existing(folder: Path) -> None:
    """Raise an error if a path exists, unless it is an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{str(folder)!r} exists already; give the name of a new folder")


def kind_of(path: Path) -> FileKind | None:
    """Return the kind of a file or a folder; None if it is unknown or cannot be read."""
    try:
        return _kind_of_folder(path) if path.is_dir() else _kind_of_file(path)
    except OSError:
        return None


def is_run(path: Path) -> bool:
    """Return whether a folder holds a training run or an evaluation."""
    return path.is_dir() and kind_of(path) in (RUN, EVALUATION)


def runs_in(path: Path) -> list[Path]:
    """Return the runs directly below a folder, such as `runs/demo/train` in `runs/demo`."""
    try:
        return sorted(inner for inner in path.iterdir() if is_run(inner))
    except OSError:
        return []


def only_run(path: Path) -> Path:
    """Return the only run in a folder. Return the path itself if there is not exactly one run."""
    if not path.is_dir() or kind_of(path) is not None or any(path.glob("*.parquet")):
        return path
    runs = runs_in(path)
    return runs[0] if len(runs) == 1 else path


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the runs and evaluations at the paths and below them, each once. Files are returned unchanged."""
    found = (
        run for path in paths for run in ([path] if path.is_file() else _runs_below(path, SEARCHED_DEPTH))
    )
    return list({run.resolve(): run for run in found}.values())


def _runs_below(path: Path, depth: int) -> Iterator[Path]:
    kind = kind_of(path)
    if kind in (RUN, EVALUATION):
        yield path
    elif kind is not None:
        return
    if not depth:
        return
    try:
        inner = sorted(
            folder
            for folder in path.iterdir()
            if folder.is_dir() and folder.name[0] != "." and folder.name not in NOT_SEARCHED
        )
    except OSError:
        return
    for folder in inner:
        yield from _runs_below(folder, depth - 1)


def model_in(path: Path) -> Path | None:
    """Return the model folder of a checkpoint, or of the last checkpoint of a run."""
    checkpoints = [
        path,
        *sorted(path.glob("checkpoints/step-*"), reverse=True),
        *path.glob("*/checkpoints/step-*"),
    ]
    models = (checkpoint / "model" for checkpoint in checkpoints)
    return next((model for model in models if kind_of(model) is MODEL), None)


def _kind_of_folder(path: Path) -> FileKind | None:
    if (path / DATASET_DICT_FILE).is_file() or all(
        (path / name).is_file() for name in (DATASET_FILE, STATE_FILE)
    ):
        return SAVED_DATASET
    marks = [
        (RUN, ("checkpoints", "metrics.jsonl", "trajectories")),
        (EVALUATION, ("summary.json", "rollout.journal")),
        (CHECKPOINT, (STATE_FILE,)),
        (MODEL, ("config.json", "tokenizer_config.json", "tokenizer.json")),
    ]
    for kind, names in marks:
        if any((path / name).exists() for name in names):
            return kind
    return None


def _kind_of_file(path: Path) -> FileKind | None:
    if path.suffix in (".csv", ".gz"):
        return ROWS
    with path.open("rb") as file:
        first_line = file.readline(MAX_LINE)
    if first_line.startswith(PARQUET_MAGIC) or path.suffix == ".parquet":
        return _kind_of_parquet(path)
    if first_line.startswith(JOURNAL_MAGIC):
        return JOURNAL
    if path.suffix in (".yaml", ".yml"):
        return SETTINGS
    if first_line.startswith(TRACE_START):
        return TRACES  # the line may be incomplete
    try:
        value: Any = parse_json(first_line)
    except ValueError:
        return ROWS if path.suffix == ".json" else None
    if isinstance(value, list) and path.suffix == ".json":
        return ROWS
    return _kind_of_record({*cast(dict[str, Any], value)}) if isinstance(value, dict) else None


def _kind_of_record(names: set[str]) -> FileKind | None:
    if {"trajectory_id", "segments"} <= names:
        return RECORDS
    if "step" in names and any("/" in name for name in names):
        return METRICS
    return ROWS if names & {"prompt", "raw_prompt", "question", "agent_name"} else None


def _kind_of_parquet(path: Path) -> FileKind:
    arrow: Any = import_module("pyarrow")  # late: takes long to import
    parquet: Any = import_module("pyarrow.parquet")
    try:
        metadata: Mapping[bytes, bytes] = parquet.read_metadata(path).metadata or {}
    except (OSError, arrow.ArrowException):
        return DAMAGED_PARQUET
    return STORED_TRAJECTORIES if STORED in metadata else OTHER_PARQUET
