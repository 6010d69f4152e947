"""Folder of a run: checks before writing to it, the checkpoint to resume from, and the result."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from agent_loop.config import Config
from agent_loop.errors import CheckpointError, ConfigError
from agent_loop.storage.metrics_file import CONFIG_FILE, METRICS_FILE, written_parts
from agent_loop.storage.run import drop_steps_after
from agent_loop.training.checkpoint import (
    Checkpoint,
    checkpoints_folder,
    latest_checkpoint,
    list_checkpoints,
    named_checkpoint,
    step_of,
)
from agent_loop.training.evaluation.scores import Evaluation
from agent_loop.training.manifest import DataManifest
from agent_loop.training.metrics import forget_steps_after


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a run."""

    step: int
    """Completed steps, including those before a resume."""
    is_interrupted: bool
    """The run was stopped before `trainer.total_steps`."""
    run_dir: Path
    checkpoint: Path | None
    """The last checkpoint; None if none was written."""
    metrics: Mapping[str, float]
    """Metrics of the last step of this run."""
    evaluation: Evaluation | None
    """Last evaluation of this run."""


SFT_SPLIT, SFT_VAL_SPLIT = "sft", "sft_val"
"""Splits of supervised examples."""
TRAINED_SPLITS = ("train", SFT_SPLIT)
SOURCES = {
    "train": "data.train_files",
    "val": "data.val_files",
    SFT_SPLIT: "sft.files",
    SFT_VAL_SPLIT: "sft.val_files",
}
"""Setting with the files of each split."""


def find_checkpoint(run_dir: Path, *, resume: bool | str) -> Checkpoint | None:
    """Return the checkpoint to resume from; None to start from the beginning.

    Args:
        run_dir: Folder of the run.
        resume: False starts from the beginning. True or `auto` selects the last checkpoint of the run. A path selects
            that checkpoint, or the last checkpoint of the run in that folder.
    """
    if not resume:
        return None
    if resume is True or resume == "auto":
        return latest_checkpoint(run_dir)
    return named_checkpoint(Path(resume))


def check_run_folder(run_dir: Path, *, checkpoint: Checkpoint | None, overwrite: bool) -> None:
    """Raise an error if two runs would be mixed in one folder."""
    written = written_parts(run_dir)
    if checkpoint is None and written and not overwrite:
        raise ConfigError(
            f"trainer.run_dir {str(run_dir)!r} holds a run already ({' and '.join(written)}); resume it, overwrite "
            "it, or set trainer.run_dir to a new folder"
        )
    if checkpoint is not None:
        later = [path.name for path in list_checkpoints(run_dir) if step_of(path) > checkpoint.step]
        if later:
            raise CheckpointError(
                f"the run resumes after step {checkpoint.step}, but {str(run_dir)!r} holds later checkpoints "
                f"({', '.join(later)}); move them elsewhere, or set trainer.run_dir to a new folder"
            )


def check_rows_unchanged(
    checkpoint: Checkpoint, rows: Mapping[str, DataManifest], *, allow_changed: bool
) -> list[str]:
    """Raise an error if the training rows have changed, because the rows of a step follow from their positions.

    Returns:
        Notes for the user on rows that have changed.
    """
    notes: list[str] = []
    for split in sorted(rows.keys() & checkpoint.rows.keys()):
        changes = rows[split].changes_since(checkpoint.rows[split])
        if changes is None:
            continue
        if split in TRAINED_SPLITS and not allow_changed:
            raise CheckpointError(
                f"the training rows are not those of the checkpoint {str(checkpoint.path)!r} ({changes}); put the "
                "files back as they were, or set data.allow_changed_rows=true to resume with the rows as they are"
            )
        notes.append(f"the rows of {SOURCES[split]} changed since that checkpoint ({changes})")
    return notes


def prepare_run_folder(run_dir: Path, *, config: Config, checkpoint: Checkpoint | None) -> None:
    """Remove what an earlier run wrote after the checkpoint, or everything without a checkpoint; write the
    configuration."""
    run_dir.mkdir(parents=True, exist_ok=True)
    metrics_path = run_dir / METRICS_FILE
    if checkpoint is None:
        shutil.rmtree(checkpoints_folder(run_dir), ignore_errors=True)
        metrics_path.unlink(missing_ok=True)
        drop_steps_after(run_dir, step=-1)
    else:
        forget_steps_after(metrics_path, step=checkpoint.step)
        drop_steps_after(run_dir, step=checkpoint.step)
    text = yaml.safe_dump(config_values(config), sort_keys=False, allow_unicode=True)
    (run_dir / CONFIG_FILE).write_text(text, encoding="utf-8")


def config_values(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values, for files."""
    return config.model_dump(mode="json")


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any], *, prefix: str = "") -> list[str]:
    """Return the dotted keys in which two configurations differ."""
    changed: list[str] = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changed += changed_keys(
                cast(Mapping[str, Any], old), cast(Mapping[str, Any], new), prefix=f"{prefix}{key}."
            )
        elif old != new:
            changed.append(f"{prefix}{key}")
    return changed
