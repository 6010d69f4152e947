"""Selection of the rows of each step, of groups to train again, and its state in checkpoints."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agent_loop.config import Config
from agent_loop.errors import ConfigError, DataError
from agent_loop.recording.serialization import deserialize_trajectories, serialize_trajectories
from agent_loop.recording.values import Unstorable, pack, unpack
from agent_loop.training import metrics as names
from agent_loop.training.advantages.estimate import estimator_needs
from agent_loop.training.samplers import RowHistory, RowResult, SamplerContext, load_sampler
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
    data: bytes

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], *, step: int, row: int) -> StoredGroup:
        """Store a group. Raises Unstorable if it contains values that cannot be stored."""
        versions = [
            s.weight_version for t in trajectories for s in t.output.segments if s.weight_version is not None
        ]
        rollouts: defaultdict[int, list[Trajectory]] = defaultdict(list)
        for trajectory in trajectories:
            rollouts[trajectory.rollout].append(trajectory)
        forms = [[rollout, serialize_trajectories(branches)] for rollout, branches in rollouts.items()]
        return cls(step, trajectories[0].group, row, min(versions, default=step - 1), pack(forms))

    def trajectories(self, *, rows: Sequence[Row], group: int) -> list[Trajectory]:
        """Return the trajectories of the group, under another number."""
        return [
            trajectory
            for rollout, form in unpack(self.data)
            for trajectory in deserialize_trajectories(form, row=rows[self.row], group=group, rollout=rollout)
        ]


STATE_FILE = Path("rows") / "state.bin"
"""File of a checkpoint with the state of the selection."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows of a step, as indices in the data set."""

    rows: Sequence[int]
    """Rows to run."""
    spare: Sequence[int] = ()
    """Other rows, which replace groups without variance, in order."""
    replayed: Sequence[StoredGroup] = ()
    """Groups of earlier steps to train again."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    note: str | None = None
    """Note for the user."""


def max_staleness(config: Config) -> int:
    """Return how many versions the sampling weights may be older than the trained weights."""
    return config.trainer.max_staleness if config.trainer.mode == "async" else 0


class RowSelector:
    """Selects the rows of the steps of a run, in the order of the steps, each once.

    The selection of step `k` depends on the results of the steps up to `k - 1 - max_staleness`. These are complete when
    the rollout of step `k` starts, so the selection is the same in every run, killed and resumed or not.
    """

    def __init__(self, rows: Sequence[Row], config: Config) -> None:
        data, sampler = config.data, config.data.sampler
        self.rows = rows
        self.history = RowHistory(len(rows), config=sampler)
        self._config = config
        self._sampler = load_sampler(sampler.name)
        self._max_staleness = max_staleness(config)
        self._num_replayed = math.floor(sampler.replay_share * data.train_batch_size)
        self._stored: list[StoredGroup] = []
        """Groups of the last steps that may be replayed."""
        batch_size = self._num_rows(data.train_batch_size - self._num_replayed)
        self._context = SamplerContext(rows, self.history, batch_size, data)
        self._pending: dict[int, Sequence[RowResult]] = {}
        """Results by step that no selection has seen."""
        self._selections: dict[int, Selection] = {}
        """Selections of steps that are not complete."""
        if len(rows) < self._num_rows(data.train_batch_size):
            raise DataError(
                f"the data set has {len(rows)} rows, fewer than data.train_batch_size="
                f"{self._num_rows(data.train_batch_size)}; give more rows or lower the batch size"
            )
        if sampler.replay_share:
            _check_replay(config)

    def select(self, step: int) -> Selection:
        """Return the rows of a step. The first step is 1."""
        if step not in self._selections:
            self._selections[step] = self._select(step)
        return self._selections[step]

    def replayed(self, selection: Selection, *, first_group: int) -> list[Trajectory]:
        """Return the trajectories of the groups that a selection replays, numbered from `first_group` on."""
        return [
            trajectory
            for number, stored in enumerate(selection.replayed)
            for trajectory in stored.trajectories(rows=self.rows, group=first_group + number)
        ]

    def observe(
        self,
        step: int,
        results: Sequence[RowResult],
        *,
        informative: Sequence[Trajectory] = (),
        rows: Sequence[int] = (),
    ) -> None:
        """Add the results of a step that is complete, also those of rows that it did not train.

        Later steps may replay the `informative` trajectories. `rows` has the row of each group, by its number.
        """
        self._pending[step] = results
        self._selections.pop(step, None)
        if not self._num_replayed:
            return
        groups: defaultdict[int, list[Trajectory]] = defaultdict(list)
        for trajectory in informative:
            groups[trajectory.group].append(trajectory)
        for group, trajectories in groups.items():
            try:
                self._stored.append(StoredGroup.of(trajectories, step=step, row=rows[group]))
            except Unstorable as error:
                logger.warning("group %d of step %d cannot be replayed: it contains %s", group, step, error)
        self._stored = [group for group in self._stored if self._is_young(group, step + 1)]

    def save(self, folder: Path) -> None:
        """Write the state to the folder of a checkpoint."""
        state = {
            "name": self._sampler.name,
            "sampler": self._sampler.call("state_dict"),
            "history": self.history.state_dict(),
            "pending": list(self._pending.items()),
            "selections": [[step, asdict(selection)] for step, selection in self._selections.items()],
            "stored": self._stored,
        }
        path = folder / STATE_FILE
        path.parent.mkdir()
        path.write_bytes(pack(state))

    def load(self, folder: Path, *, has_same_rows: bool) -> str | None:
        """Load the state from the folder of a checkpoint, and return a note if results are lost that it depends on."""
        path = folder / STATE_FILE
        if not path.is_file() or not has_same_rows:
            why = "the rows have changed" if path.is_file() else "the checkpoint holds none"
            config = self._config.data.sampler
            uses_filters = config.skip_solved or config.skip_failed or config.replay_share
            uses_results = config.name != "uniform" or uses_filters
            return f"data.sampler starts without results: {why}" if uses_results else None
        state = unpack(path.read_bytes())
        self.history.load_state_dict(state["history"])
        self._pending = {step: [RowResult(*each) for each in results] for step, results in state["pending"]}
        self._selections = {
            step: replace(Selection(**form), replayed=[StoredGroup(*group) for group in form["replayed"]])
            for step, form in state["selections"]
        }
        self._stored = [StoredGroup(*group) for group in state["stored"]]
        if state["name"] == self._sampler.name:
            self._sampler.call("load_state_dict", state["sampler"])
        return None

    def _num_rows(self, num_groups: int) -> int:
        return math.ceil(num_groups * self._config.rollout.over_sample)

    def _is_young(self, group: StoredGroup, step: int) -> bool:
        return step - 1 - group.oldest_version <= self._config.data.sampler.replay_max_age

    def _select(self, step: int) -> Selection:
        newest, num_groups = step - 1 - self._max_staleness, self._config.data.train_batch_size
        for each in sorted(step for step in self._pending if step <= newest):
            results = self._pending.pop(each)
            self.history.observe(each, results)
            self._sampler.call("observe", each, results)
        replayed = self._select_replayed(step, newest=newest)
        num_rows, num_all = self._num_rows(num_groups - len(replayed)), len(self.rows)
        num_spare = self._config.algorithm.max_refills * num_groups
        skipped_by = self.history.skipped_by(step)
        is_skipped_N = np.logical_or.reduce([np.zeros(num_all, np.bool_), *skipped_by.values()])
        count = min(num_rows + num_spare + int(is_skipped_N.sum()), num_all)
        order = self._sampler.order(step, count=count, context=self._context)
        kept = [row for row in order if not is_skipped_N[row]]
        skipped = [row for row in order if is_skipped_N[row]]
        note = None
        filters = [f"data.sampler.{name}" for name, is_N in skipped_by.items() if is_N.any()]
        if len(kept) < num_rows and filters:
            note = (
                f"step {step} needs {num_rows} rows, and {' and '.join(filters)} skip all but {len(kept)}; skipped "
                "rows fill the step"
            )
        seen_N = self.history.num_results_N > 0
        metrics = {
            names.ROWS_SEEN: float(seen_N.sum()),
            names.ROWS_SKIPPED_SHARE: float(is_skipped_N.mean()),
        }
        if seen_N.any():
            metrics[names.ROWS_SUCCESS] = float(self.history.success_N[seen_N].mean())
        return Selection(
            [*kept, *skipped][:num_rows],
            spare=kept[num_rows : num_rows + num_spare],
            replayed=replayed,
            metrics=metrics,
            note=note,
        )

    def _select_replayed(self, step: int, *, newest: int) -> list[StoredGroup]:
        """Take groups out of the stored ones at random, so that each is replayed once."""
        found = sorted(g for g in self._stored if g.step <= newest and self._is_young(g, step))
        random = np.random.default_rng([self._config.data.seed, step, _REPLAY])
        order: list[int] = random.permutation(len(found))[: self._num_replayed].tolist()
        selected = [found[index] for index in order]
        self._stored = [group for group in self._stored if group not in selected]
        return selected


def _check_replay(config: Config) -> None:
    sampler, estimator = config.data.sampler, config.algorithm.adv_estimator
    least_age = 2 * max_staleness(config) + 1
    if sampler.replay_max_age < least_age:
        raise ConfigError(
            f"data.sampler.replay_max_age is {sampler.replay_max_age}, but with trainer.max_staleness="
            f"{max_staleness(config)} the newest group that can be replayed is {least_age} versions old; give at least "
            f"{least_age}, or set replay_share=0"
        )
    if estimator_needs(estimator).greedy_rollouts:
        raise ConfigError(
            f"data.sampler.replay_share is {sampler.replay_share:g}, but algorithm.adv_estimator={estimator} needs "
            "greedy rollouts of the same weights, which replayed groups lack; set replay_share=0, or use another "
            "estimator"
        )
