"""Checkpoints: one folder per step, which is either complete or absent.

checkpoints/step-000040/
    model/       what `transformers` loads: weights, config, tokenizer
    critic/      the same for the critic, where there is one
    rows/        the results of the rows so far, for the selection of rows
    trainer/     what `torch.distributed.checkpoint` loads into any number of processes: optimiser, random states
    state.json   step, configuration, the files of the rows, the size and CRC-32 of every other file
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol, cast

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from agent_loop.errors import CheckpointError
from agent_loop.runtime.describe import describe_error
from agent_loop.storage.exclusive import sync_to_disk
from agent_loop.storage.metrics_file import CHECKPOINTS_FOLDER
from agent_loop.training.manifest import DataManifest, find_damage, manifest_of

STATE_FILE = "state.json"
TRAINER_FOLDER = "trainer"
MODEL_FOLDER = "model"
_UNWRITTEN = (OSError, SafetensorError, CheckpointException)
"""Errors that libraries raise when they write a checkpoint to a full or read-only disk."""


class SavesItself(Protocol):
    """Learner or selection of rows that a checkpoint saves."""

    def save(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Checkpoint on disk whose files are complete."""

    path: Path
    step: int
    """Completed steps."""
    config: Mapping[str, Any]
    """Configuration of the run that wrote the checkpoint."""
    rows: Mapping[str, DataManifest] = field(default_factory=dict[str, DataManifest])
    """Rows of the run, by split (`train`, `val`); empty in checkpoints of older versions."""

    @property
    def model_path(self) -> Path:
        return self.path / MODEL_FOLDER


def save_checkpoint(
    run_dir: Path,
    *,
    step: int,
    learner: SavesItself,
    tokenizer: Any,
    config: Mapping[str, Any],
    rows: Mapping[str, DataManifest] | None = None,
    selector: SavesItself | None = None,
    keep: int,
) -> Path:
    """Write a checkpoint, then remove all but the last `keep` of the run."""
    folder = checkpoints_folder(run_dir)
    final, temporary = folder / f"step-{step:06d}", folder / f".step-{step:06d}.tmp"
    try:
        for half_written in folder.glob(".step-*.tmp"):
            shutil.rmtree(half_written)
        temporary.mkdir(parents=True)
        learner.save(temporary)
        if selector is not None:
            selector.save(temporary)
        tokenizer.save_pretrained(str(temporary / MODEL_FOLDER))
        state = {
            "step": step,
            "version": version("agent-loop"),
            "config": dict(config),
            "rows": {split: asdict(manifest) for split, manifest in (rows or {}).items()},
            "files": manifest_of(temporary),
        }
        (temporary / STATE_FILE).write_text(json.dumps(state, indent=2), encoding="utf-8")
        for path in [*sorted(path for path in temporary.rglob("*") if path.is_file()), temporary]:
            sync_to_disk(path)
        os.replace(temporary, final)
        sync_to_disk(folder)
    except _UNWRITTEN as error:
        shutil.rmtree(temporary, ignore_errors=True)
        earlier = list_checkpoints(run_dir)
        last_good = (
            f"the last one is {str(earlier[-1])!r}, unchanged." if earlier else "there was none before."
        )
        raise CheckpointError(
            f"the checkpoint {str(final)!r} cannot be written ({describe_error(error)}); {last_good} Free the disk or "
            "correct the permissions, then resume"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in list_checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def save_state(state: dict[str, Any], folder: Path) -> None:
    """Write nested tensors to the folder of a checkpoint. If tensors are sharded, all ranks must call this."""
    with _without_single_process_warning():
        cast(Any, dcp).save(state, checkpoint_id=folder / TRAINER_FOLDER)


def load_state(state: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Load saved tensors into nested tensors of the same names, even if they were sharded differently."""
    try:
        with _without_single_process_warning():
            cast(Any, dcp).load(state, checkpoint_id=checkpoint.path / TRAINER_FOLDER)
    except (CheckpointException, RuntimeError, UnpicklingError, EOFError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise _damaged(checkpoint.path, f"{TRAINER_FOLDER} cannot be read ({reason})") from error


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, earliest first, without incomplete ones."""
    folder = checkpoints_folder(run_dir)
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(named, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def latest_checkpoint(run_dir: Path, *, parts: Collection[str] | None = None) -> Checkpoint:
    """Return the last checkpoint of a run. Raises a CheckpointError if it has none, or the last one is damaged."""
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints:
        raise CheckpointError(
            f"{str(checkpoints_folder(run_dir))!r} holds no checkpoint; start without resume, or set "
            "trainer.run_dir to the folder of the run to resume"
        )
    return open_checkpoint(checkpoints[-1], parts=parts)


def named_checkpoint(path: Path, *, parts: Collection[str] | None = None) -> Checkpoint:
    """Return the checkpoint in a folder, or the last checkpoint of the run in it; see `latest_checkpoint`."""
    if list_checkpoints(path):
        return latest_checkpoint(path, parts=parts)
    if path.is_dir() and not (path / STATE_FILE).is_file():
        raise CheckpointError(
            f"{str(path)!r} holds no run (checkpoints/step-...) and no checkpoint ({STATE_FILE}); give one"
        )
    return open_checkpoint(path, parts=parts)


def open_checkpoint(path: Path, *, parts: Collection[str] | None = None) -> Checkpoint:
    """Read the state file of a checkpoint, and check the size and the checksum of its files by reading them."""
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {str(path)!r} does not exist; give a folder like .../step-000040")
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        checkpoint = Checkpoint(
            path=path,
            step=int(state["step"]),
            config=dict(state["config"]),
            rows={split: DataManifest.read(**form) for split, form in dict(state.get("rows", {})).items()},
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{STATE_FILE} cannot be read ({type(error).__name__}: {error})") from error
    try:
        complaint = find_damage(path, state["files"], parts=parts)
    except OSError as error:
        complaint = f"a file cannot be read ({error.strerror})"
    if complaint is not None:
        raise _damaged(path, complaint)
    return checkpoint


def checkpoints_folder(run_dir: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return run_dir / CHECKPOINTS_FOLDER


def _damaged(path: Path, why: str) -> CheckpointError:
    others = list_checkpoints(path.parent.parent)
    earlier = others[: others.index(path)] if path in others else []
    advice = (
        f"move that folder elsewhere and resume, which takes the checkpoint before it, {str(earlier[-1])!r}"
        if earlier
        else "copy it again from a complete copy; its run has no earlier checkpoint"
    )
    return CheckpointError(f"checkpoint {str(path)!r} is damaged: {why}; {advice}")


@contextmanager
def _without_single_process_warning() -> Generator[None]:
    """Suppress the warning of `torch.distributed.checkpoint` about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
