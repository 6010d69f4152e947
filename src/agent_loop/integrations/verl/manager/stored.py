"""Run folder of a verl run: its settings and its trajectories, for the viewer and the commands of this package."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs
from omegaconf import DictConfig, OmegaConf

from agent_loop.config import Config
from agent_loop.integrations.verl.manager.rows import RECORD, VerlRecord
from agent_loop.integrations.verl.manager.settings import run_dir_of
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.threads import run_in_thread
from agent_loop.storage.metrics_file import CONFIG_FILE
from agent_loop.storage.run import drop_all_but_newest, drop_steps_after, step_path
from agent_loop.storage.schema import VOCABULARY_FILE
from agent_loop.storage.vocabulary import write_vocabulary
from agent_loop.storage.writer import write_trajectories
from agent_loop.trajectory import Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchName:
    """Step and purpose of a batch of verl's trainer."""

    step: int
    validate: bool

    @property
    def split(self) -> str:
        return "val" if self.validate else "train"


def batch_name(columns: Any) -> BatchName:
    """Return the name of a batch, from the meta info of a `DataProto` or from a `TensorDict`."""
    step, validate = _value(columns, "global_steps", 0), _value(columns, "validate", False)
    return BatchName(int(step), validate=bool(validate))


def _value(columns: Any, name: str, default: Any) -> Any:
    try:
        return columns[name]  # a `TensorDict` returns a wrapper from `get`
    except KeyError:
        return default


class RunFolder:
    """The folder, as the manager sees it: prepares it, and numbers the groups of all workers."""

    def __init__(self, config: DictConfig) -> None:
        self._path = run_dir_of(config)
        self._is_new = True
        self._num_groups: Counter[BatchName] = Counter()
        if self._path is not None:
            self._path.mkdir(parents=True, exist_ok=True)
            text = OmegaConf.to_yaml(config, resolve=True)
            (self._path / CONFIG_FILE).write_text(text, encoding="utf-8")

    def first_group(self, batch: BatchName, *, num_groups: int) -> int:
        """Return the number of a batch's first group. Numbers are distinct within a step."""
        if self._is_new and self._path is not None:
            # A run that was resumed writes the later steps again.
            drop_steps_after(self._path, step=batch.step if batch.validate else batch.step - 1)
        self._is_new = False
        first = self._num_groups[batch]
        self._num_groups[batch] += num_groups
        return first

    def places(self, batch: BatchName, uids: Sequence[Any]) -> list[tuple[int, int]]:
        """Return group and rollout of each row of a batch. Rows with the same uid are a group."""
        numbers: dict[Any, int] = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
        first = self.first_group(batch, num_groups=len(numbers))
        num_rollouts: Counter[Any] = Counter()
        places: list[tuple[int, int]] = []
        for uid in uids:
            places.append((first + numbers[uid], num_rollouts[uid]))
            num_rollouts[uid] += 1
        return places


class TrajectoryFiles:
    """The files of one worker in the folder. Without a folder, nothing is written.

    An error of a file is logged, and does not stop the run.
    """

    def __init__(self, run_dir: Path | None, *, settings: Config, tokenizer: Any, worker: int) -> None:
        self._run_dir = run_dir
        self._num_steps = settings.trainer.keep_trajectories
        self._success_threshold = settings.reward.success_threshold
        self._tokenizer = tokenizer
        self._worker = worker
        self._num_batches: Counter[BatchName] = Counter()

    async def write(self, batch: BatchName, records: Sequence[VerlRecord]) -> None:
        """Write the trajectories of a batch that has ended, with verl's scores."""
        if self._run_dir is None or self._num_steps == 0:
            return
        number = self._num_batches[batch]
        self._num_batches[batch] += 1
        path = step_path(self._run_dir, split=batch.split, step=batch.step, part=f"{self._worker}-{number}")
        trajectories = [trajectory for record in records for trajectory in _scored(record)]
        try:
            await run_in_thread(partial(self._write, path, trajectories, batch, run_dir=self._run_dir))
        except Exception as error:  # noqa: BLE001  (the batch itself is complete)
            logger.warning("trajectories cannot be stored in %s: %s", path, describe_error(error))

    def _write(
        self, path: Path, trajectories: Sequence[Trajectory], batch: BatchName, *, run_dir: Path
    ) -> None:
        if not (run_dir / VOCABULARY_FILE).exists():
            write_vocabulary(run_dir / VOCABULARY_FILE, self._tokenizer)
        write_trajectories(
            path,
            trajectories,
            step=batch.step,
            split=batch.split,
            weight_version=batch.step if batch.validate else batch.step - 1,
            success_threshold=self._success_threshold,
        )
        if self._num_steps is not None:
            drop_all_but_newest(run_dir, num_steps=self._num_steps)


def _scored(record: VerlRecord) -> list[Trajectory]:
    """Return the trajectories of a record with verl's scores, numbered within their step."""
    group, first_rollout = record.place
    outputs = record.outputs or [None] * len(record.trajectories)
    scored: list[Trajectory] = []
    for trajectory, output in zip(record.trajectories, outputs, strict=True):
        score = None if output is None or record.is_failed else output.reward_score
        extra: dict[str, Any] = {} if output is None else output.extra_fields.get("reward_extra_info", {})
        scored.append(
            structs.replace(
                trajectory,
                row={name: value for name, value in trajectory.row.items() if name != RECORD},
                group=group,
                rollout=first_rollout,
                reward=None if score is None else float(score),
                reward_extra=extra,
            )
        )
    return scored
