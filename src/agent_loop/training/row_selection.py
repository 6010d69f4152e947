"""Selection of the rows of each step, of groups to train again, and its state in checkpoints."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agent_loop.config import Config, DataConfig
from agent_loop.errors import ConfigError, DataError
from agent_loop.recording.serialization import deserialize_trajectories, serialize_trajectories
from agent_loop.recording.values import Unstorable, pack, unpack
from agent_loop.training import metrics as names
from agent_loop.training.advantages.estimate import estimator_needs
from agent_loop.training.samplers import LoadedSampler, RowHistory, RowResult, SamplerContext, load_sampler
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row

logger = logging.getLogger(__name__)

_REPLAY = 3
"""Part of the seed that separates the draws of groups from other draws with the same seed."""


class StoredGroup(NamedTuple):
    """Group of an earlier step, as bytes, so that a resumed run replays the same values as a run that never stopped."""

    step: int
    group: int
    """Number of the group in its step."""
    row: int
    """Index of its row in the data set."""
    oldest_version: int
    """Smallest weight version of its sampled tokens."""
    is_selected: bool
    """Whether a step has selected it. A group is replayed once."""
    data: bytes


class ReplayBuffer:
    """Groups of the last steps."""

    def __init__(self, *, max_age: int, seed: int) -> None:
        self._max_age = max_age
        self._seed = seed
        self._groups: dict[tuple[int, int], StoredGroup] = {}

    def add(self, step: int, trajectories: Sequence[Trajectory], *, row: int) -> None:
        """Add a group with a signal. A group with values that cannot be stored is left out, with a warning."""
        versions = [
            segment.weight_version
            for trajectory in trajectories
            for segment in trajectory.output.segments
            if segment.weight_version is not None
        ]
        rollouts: dict[int, list[Trajectory]] = {}
        for trajectory in trajectories:
            rollouts.setdefault(trajectory.rollout, []).append(trajectory)
        try:
            data = pack(
                [[rollout, serialize_trajectories(branches)] for rollout, branches in rollouts.items()]
            )
        except Unstorable as error:
            logger.warning(
                "group %d of step %d cannot be replayed: it contains %s", trajectories[0].group, step, error
            )
            return
        group = trajectories[0].group
        self._groups[step, group] = StoredGroup(
            step, group, row, min(versions, default=step - 1), False, data
        )

    def select(self, step: int, *, count: int, last_step: int) -> list[tuple[int, int]]:
        """Select groups for a step at random, at most `count`, and return their keys: step and group."""
        keys = sorted(
            key
            for key, group in self._groups.items()
            if group.step <= last_step
            and not group.is_selected
            and step - 1 - group.oldest_version <= self._max_age
        )
        random = np.random.default_rng([self._seed, step, _REPLAY])
        order: list[int] = random.permutation(len(keys))[:count].tolist()
        selected = [keys[index] for index in order]
        for key in selected:
            self._groups[key] = self._groups[key]._replace(is_selected=True)
        return selected

    def trajectories(self, key: tuple[int, int], *, rows: Sequence[Row], group: int) -> list[Trajectory]:
        """Return the trajectories of a group, under another number."""
        stored = self._groups[key]
        return [
            trajectory
            for rollout, form in unpack(stored.data)
            for trajectory in deserialize_trajectories(
                form, row=rows[stored.row], group=group, rollout=rollout
            )
        ]

    def drop(self, keys: Iterable[tuple[int, int]]) -> None:
        """Drop groups that have been replayed."""
        for key in keys:
            self._groups.pop(key, None)

    def drop_old(self, step: int) -> None:
        """Drop the groups that are too old for a step and all later ones."""
        kept = {
            key: group
            for key, group in self._groups.items()
            if step - 1 - group.oldest_version <= self._max_age
        }
        self._groups = kept

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the groups as plain values."""
        return [group._asdict() for group in self._groups.values()]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Load the groups that `state_dict` returned."""
        self._groups = {(group["step"], group["group"]): StoredGroup(**group) for group in state}


STATE_FILE = Path("rows") / "state.bin"
"""File of a checkpoint with the state of the selection."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows of a step, as indices in the data set."""

    rows: Sequence[int]
    """Rows to run."""
    spare: Sequence[int] = ()
    """Other rows, which replace groups without variance, in order."""
    replayed: Sequence[tuple[int, int]] = ()
    """Groups of earlier steps to train again: step and number of each."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    note: str | None = None
    """Note for the user."""

    @classmethod
    def read(cls, form: Mapping[str, Any]) -> Selection:
        """Return the selection that `asdict` returned."""
        keys = [(step, group) for step, group in form["replayed"]]
        return cls(form["rows"], form["spare"], keys, form["metrics"], form["note"])


class RowSelector:
    """Selects the rows of the steps of a run, in the order of the steps, each once.

    The selection of step `k` depends on the results of the steps up to `k - 1 - max_staleness`. These are complete when
    the rollout of step `k` starts, so the selection is the same in every run, killed and resumed or not.

    Args:
        rows: The data set.
        config: Settings of the selection.
        sampler: Orders the rows.
        over_sample: Rows to run per group that is needed.
        max_refills: How often groups without variance are replaced.
        max_staleness: Number of steps whose rollouts run ahead.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        config: DataConfig,
        sampler: LoadedSampler,
        over_sample: float = 1.0,
        max_refills: int = 0,
        max_staleness: int = 0,
    ) -> None:
        self.rows = rows
        self.history = RowHistory(len(rows), config=config.sampler)
        self._sampler = sampler
        self._num_groups = num_groups = config.train_batch_size
        self._over_sample = over_sample
        self._num_spare = max_refills * num_groups
        self._max_staleness = max_staleness
        self._num_replayed = math.floor(config.sampler.replay_share * num_groups)
        self._replay = ReplayBuffer(max_age=config.sampler.replay_max_age, seed=config.seed)
        self._context = SamplerContext(
            rows, self.history, self._num_rows(num_groups - self._num_replayed), config
        )
        self._pending: dict[int, Sequence[RowResult]] = {}
        """Results by step that no selection has seen."""
        self._selections: dict[int, Selection] = {}
        """Selections of steps that are not complete."""
        if len(rows) < self._num_rows(num_groups):
            raise DataError(
                f"the data set has {len(rows)} rows, fewer than data.train_batch_size={self._num_rows(num_groups)}; "
                "give more rows or lower the batch size"
            )

    def select(self, step: int) -> Selection:
        """Return the rows of a step. The first step is 1."""
        if step not in self._selections:
            self._selections[step] = self._select(step)
        return self._selections[step]

    def replayed(self, selection: Selection, *, first_group: int) -> list[Trajectory]:
        """Return the trajectories of the groups that a selection replays, numbered from `first_group` on."""
        return [
            trajectory
            for number, key in enumerate(selection.replayed)
            for trajectory in self._replay.trajectories(key, rows=self.rows, group=first_group + number)
        ]

    def observe(
        self,
        step: int,
        results: Sequence[RowResult],
        *,
        informative: Sequence[Trajectory] = (),
        rows: Sequence[int] = (),
    ) -> None:
        """Add the results of a step that is complete.

        Args:
            step: The step.
            results: Results of all its rows, also of those that it did not train.
            informative: Trajectories of its groups with a signal, which later steps may replay.
            rows: Row of each group, by the number of the group.
        """
        self._pending[step] = results
        trained = self._selections.pop(step, None)
        self._replay.drop(trained.replayed if trained is not None else ())
        if self._num_replayed:
            groups: defaultdict[int, list[Trajectory]] = defaultdict(list)
            for trajectory in informative:
                groups[trajectory.group].append(trajectory)
            for group, trajectories in groups.items():
                self._replay.add(step, trajectories, row=rows[group])
            self._replay.drop_old(step + 1)

    def save(self, folder: Path) -> None:
        """Write the state to the folder of a checkpoint."""
        state = {
            "name": self._sampler.name,
            "sampler": self._sampler.state_dict(),
            "history": self.history.state_dict(),
            "pending": list(self._pending.items()),
            "selections": [[step, asdict(selection)] for step, selection in self._selections.items()],
            "replay": self._replay.state_dict(),
        }
        path = folder / STATE_FILE
        path.parent.mkdir()
        path.write_bytes(pack(state))

    def load(self, folder: Path, *, has_same_rows: bool) -> str | None:
        """Load the state from the folder of a checkpoint.

        Returns:
            A note for the user if results are lost that the selection depends on.
        """
        path = folder / STATE_FILE
        if not path.is_file() or not has_same_rows:
            why = "the rows have changed" if path.is_file() else "the checkpoint holds none"
            return f"data.sampler starts without results: {why}" if self._uses_results else None
        state = unpack(path.read_bytes())
        self.history.load_state_dict(state["history"])
        self._pending = {
            step: [RowResult(*result) for result in results] for step, results in state["pending"]
        }
        self._selections = {step: Selection.read(form) for step, form in state["selections"]}
        self._replay.load_state_dict(state["replay"])
        if state["name"] == self._sampler.name:
            self._sampler.load_state_dict(state["sampler"])
        return None

    @property
    def _uses_results(self) -> bool:
        config = self._context.config.sampler
        return config.name != "uniform" or bool(
            config.skip_solved or config.skip_failed or config.replay_share
        )

    def _num_rows(self, num_groups: int) -> int:
        return math.ceil(num_groups * self._over_sample)

    def _select(self, step: int) -> Selection:
        newest = step - 1 - self._max_staleness
        for each in sorted(step for step in self._pending if step <= newest):
            results = self._pending.pop(each)
            self.history.observe(each, results)
            self._sampler.observe(each, results)
        replayed = self._replay.select(step, count=self._num_replayed, last_step=newest)
        num_rows, num_all = self._num_rows(self._num_groups - len(replayed)), len(self.rows)
        skipped_by = self.history.skipped_by(step)
        is_skipped_N = np.logical_or.reduce([np.zeros(num_all, np.bool_), *skipped_by.values()])
        count = min(num_rows + self._num_spare + int(is_skipped_N.sum()), num_all)
        order = self._sampler.order(step, count=count, context=self._context)
        kept = [row for row in order if not is_skipped_N[row]]
        skipped = [row for row in order if is_skipped_N[row]]
        rows = [*kept, *skipped][:num_rows]
        return Selection(
            rows,
            spare=kept[num_rows : num_rows + self._num_spare],
            replayed=replayed,
            metrics=self._metrics(is_skipped_share=float(is_skipped_N.mean())),
            note=_lifted(
                step, len(kept), num_rows, [name for name, is_N in skipped_by.items() if is_N.any()]
            ),
        )

    def _metrics(self, *, is_skipped_share: float) -> dict[str, float]:
        seen_N = self.history.num_results_N > 0
        metrics = {names.ROWS_SEEN: float(seen_N.sum()), names.ROWS_SKIPPED_SHARE: is_skipped_share}
        if seen_N.any():
            metrics[names.ROWS_SUCCESS] = float(self.history.success_N[seen_N].mean())
        return metrics


def make_selector(rows: Sequence[Row], *, config: Config, max_staleness: int) -> RowSelector:
    """Return the selector of a training."""
    sampler, estimator = config.data.sampler, config.algorithm.adv_estimator
    least_age = 2 * max_staleness + 1
    if sampler.replay_share and sampler.replay_max_age < least_age:
        raise ConfigError(
            f"data.sampler.replay_max_age is {sampler.replay_max_age}, but with trainer.max_staleness={max_staleness} "
            f"the newest group that can be replayed is {least_age} versions old; give at least {least_age}, or set "
            "replay_share=0"
        )
    if sampler.replay_share and estimator_needs(estimator).greedy_rollouts:
        raise ConfigError(
            f"data.sampler.replay_share is {sampler.replay_share:g}, but algorithm.adv_estimator={estimator} needs "
            "greedy rollouts of the same weights, which replayed groups lack; set replay_share=0, or use another "
            "estimator"
        )
    return RowSelector(
        rows,
        config=config.data,
        sampler=load_sampler(sampler.name),
        over_sample=config.rollout.over_sample,
        max_refills=config.algorithm.max_refills,
        max_staleness=max_staleness,
    )


def _lifted(step: int, num_kept: int, num_rows: int, filters: Sequence[str]) -> str | None:
    """Return the note that a step has too few rows that no filter skips; None if it has enough."""
    if num_kept >= num_rows or not filters:
        return None
    settings = " and ".join(f"data.sampler.{name}" for name in filters)
    return f"step {step} needs {num_rows} rows, and {settings} skip all but {num_kept}; skipped rows fill the step"
