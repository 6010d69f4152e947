"""Journal of one rollout: its identity, its contents from before a crash, and its new records."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

from agent_loop.config import Config
from agent_loop.errors import JournalError
from agent_loop.recording.record import RecordKind, RowRecord, Sink
from agent_loop.recording.row_log import RowLog
from agent_loop.recording.serialization import serialize_rewards, with_recorded_rewards
from agent_loop.recording.values import Unstorable, digest, pack, unpack
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.journal.file import JournalWriter, read_records
from agent_loop.runtime.threads import run_in_thread
from agent_loop.storage.exclusive import exclusive_file
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row

logger = logging.getLogger(__name__)
Rewards: TypeAlias = dict[str, dict[int | None, Mapping[str, Any]]]

FREE_KEYS = frozenset(
    {
        "num_servers", "server_urls", "start_timeout_s", "request_timeout_s", "weight_transfer", "free_cache_engine",
        "max_concurrent", "max_failed_share", "journal", "num_workers", "trust_remote_code", "device", "watchdog_s",
        "on_weight_update", "retries",
    }
)  # fmt: skip
"""Settings that may change between a crash and the resume, because no token depends on them."""


def rollout_settings(config: Config) -> dict[str, Any]:
    """Return the settings on which the tokens of a rollout depend."""
    return _without_free_keys(config.model_dump(mode="json", include={"model", "rollout", "reward"}))


def training_settings(config: Config) -> dict[str, Any]:
    """Return the settings on which the trained weights, and thus the tokens of the rollouts, depend."""
    return rollout_settings(config) | config.model_dump(
        mode="json", include={"algorithm", "actor", "distillation"}
    )


@dataclass(frozen=True, slots=True)
class StepKey:
    """Identity of the rollout that a journal belongs to. Other rollouts cannot resume from this journal."""

    step: int
    weight_version: int
    num_samples: int
    """Trajectories per row."""
    rows: str
    """Digest of the rows."""
    settings: Mapping[str, Any]
    """Other settings that the rollout's tokens depend on."""

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        *,
        step: int,
        weight_version: int,
        num_samples: int,
        settings: Mapping[str, Any],
    ) -> StepKey:
        """Return the key of a rollout of these rows."""
        return cls(
            step=step,
            weight_version=weight_version,
            num_samples=num_samples,
            rows=digest([dict(row) for row in rows]),
            settings=settings,
        )

    def differences(self, other: StepKey) -> list[str]:
        """Return the names of the fields and settings that differ."""
        return _differing(_plain(self), _plain(other))

    def packed(self) -> bytes:
        """Return the first record of the journal, packed."""
        return pack({"is": RecordKind.STEP, "got": asdict(self)})


@dataclass(slots=True)
class Contents:
    """Contents of a journal of an earlier process."""

    key: StepKey | None = None
    """Identity of the rollout; None if the journal has no record of it."""
    records: dict[str, RowRecord] = field(default_factory=dict[str, RowRecord])
    """Records by row."""
    rewards: Rewards = field(default_factory=dict[str, dict[int | None, Mapping[str, Any]]])
    """Results of a batch reward function, by row and branch; see `serialize_rewards`."""
    complete: Sequence[tuple[int, int]] | None = None
    """Group and rollout of each trajectory, if the rollout has ended; else None."""
    num_bytes: int = 0
    """Number of bytes of the file to keep; 0 starts a new file."""
    note: str = ""
    """Note for the user; empty if there is none."""

    def add(self, payload: Mapping[str, Any]) -> None:
        """Add the next record of the journal."""
        kind = RecordKind(payload["is"])
        if kind is RecordKind.STEP:
            self.key = self.key or StepKey(**payload["got"])
        elif kind is RecordKind.COMPLETE:
            self.complete = [(int(group), int(rollout)) for group, rollout in payload["got"]]
        elif kind is RecordKind.REWARDS:
            for row, forms in payload["got"].items():
                self.rewards.setdefault(row, {}).update({form["branch"]: form for form in forms})
        else:
            self.records.setdefault(payload["row"], RowRecord()).add(payload)
            if kind is RecordKind.END:  # Earlier rewards belong to other trajectories.
                self.rewards.pop(payload["row"], None)


def read_contents(path: Path, *, key: StepKey, refuse: bool) -> Contents:
    """Read a journal, which need not exist. A file of another rollout is an error, or is replaced with a note.

    Raises:
        JournalError: The file is damaged, or is not a journal of this rollout.
    """
    name, contents = f"the journal {str(path)!r}", Contents()
    try:
        payloads, num_bytes = read_records(path.read_bytes())
    except FileNotFoundError:
        return contents
    except (JournalError, OSError) as error:
        raise JournalError(f"{name} cannot be read: {error}") from error
    for payload in payloads:
        contents.add(unpack(payload))
    if contents.key is None:
        return Contents(note=f"{name} has no records; the rollout starts from the beginning")
    differences = key.differences(contents.key)
    if differences:
        why = f"{name} belongs to another rollout: {', '.join(differences)} changed"
        if refuse:
            raise JournalError(
                f"{why}; restore the settings to resume, or run without --resume to start from the beginning"
            )
        return Contents(note=f"{why}; the journal is not used")
    contents.num_bytes = num_bytes
    return contents


class StepJournal:
    """Open journal of one rollout. Created by `open_journal`.

    Rows that ended are not run again. The other rows get a log that replays their records first.
    """

    def __init__(self, contents: Contents, *, rows: Sequence[Row], sink: Sink) -> None:
        self.note = contents.note
        """Note for the user; empty if there is none."""
        self._records = contents.records
        self._rewards = contents.rewards
        self._complete = contents.complete
        self._rows = rows
        self._sink = sink

    @property
    def num_ended(self) -> int:
        """Number of recorded rows that need not be run again."""
        return sum(record.has_succeeded for record in self._records.values())

    @property
    def is_complete(self) -> bool:
        """Whether the whole rollout is recorded."""
        keys = self._complete
        return keys is not None and all(self._record(*key).end is not None for key in keys)

    def outcome(self) -> list[Trajectory] | None:
        """Return the trajectories of the rollout if the whole rollout is recorded; else None."""
        if self._complete is None or not self.is_complete:
            return None
        return [
            trajectory
            for group, rollout in self._complete
            for trajectory in self._ended(self._rows[group], group=group, rollout=rollout, is_over=True)
        ]

    def divide(self, jobs: Sequence[Job]) -> tuple[list[Trajectory], list[Job]]:
        """Return the trajectories of the jobs that ended, and the other jobs, each with its log.

        A failed trajectory is run again. If only the reward of its group failed, the trajectory is returned unscored.
        """
        ended: list[Trajectory] = []
        rest: list[Job] = []
        for job in jobs:
            record = self._record(job.group, job.rollout)
            if record.has_succeeded:
                ended += self._ended(job.row, group=job.group, rollout=job.rollout, is_over=False)
            else:
                rest.append(replace(job, log=RowLog(job.job_id, sink=self._sink, record=record)))
        return ended, rest

    async def keep_rewards(self, trajectories: Sequence[Trajectory]) -> None:
        """Record the results of a batch reward function for rows that have ended.

        After this returns, the results survive a crash of the process.
        """
        rewards: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for trajectory in trajectories:
            rewards[_name(trajectory.group, trajectory.rollout)].append(serialize_rewards(trajectory))
        try:
            self._sink.append(pack({"is": RecordKind.REWARDS, "got": rewards}))
        except Unstorable as error:
            logger.warning(
                "the rewards of group %d cannot be recorded: they contain %s", trajectories[0].group, error
            )
        await self._sink.flushed()

    async def complete(self, trajectories: Sequence[Trajectory]) -> None:
        """Record that the rollout has ended with these trajectories."""
        keys = dict.fromkeys((t.group, t.rollout) for t in trajectories)
        self._sink.append(pack({"is": RecordKind.COMPLETE, "got": list(keys)}))
        await self._sink.flushed()

    def _ended(self, row: Row, *, group: int, rollout: int, is_over: bool) -> list[Trajectory]:
        """Return the trajectories of a row that ended, with their recorded rewards.

        A trajectory that failed only because of its group's reward is returned unscored, unless the rollout has ended.
        """
        forms = self._rewards.get(_name(group, rollout), {})
        trajectories = self._record(group, rollout).trajectories(row, group=group, rollout=rollout)
        for index, trajectory in enumerate(trajectories):
            form = forms.get(trajectory.branch)
            if form is not None and (is_over or not form["failure"]):
                trajectories[index] = with_recorded_rewards(trajectory, form)
        return trajectories

    def _record(self, group: int, rollout: int) -> RowRecord:
        return self._records.get(_name(group, rollout)) or RowRecord()


@asynccontextmanager
async def open_journal(
    path: Path,
    *,
    key: StepKey,
    rows: Sequence[Row],
    resume: bool,
    refuse: bool = False,
    lock: bool = True,
) -> AsyncGenerator[StepJournal]:
    """Open the journal of a rollout of `rows`. All records are on the disk when the context ends.

    Args:
        path: The file.
        key: Identity of the rollout.
        rows: The rows of the rollout.
        resume: Whether to resume from the file. Otherwise the file is replaced.
        refuse: Whether a file of another rollout is an error. Otherwise the file is replaced, with a note.
        lock: Whether to lock the file. Pass False if its folder or output is already locked.
    """
    with exclusive_file(path, name="the journal") if lock else nullcontext():
        contents = Contents()
        if resume:
            contents = await run_in_thread(read_contents, path, key=key, refuse=refuse)
        if contents.note:
            logger.warning("%s", contents.note)
        async with JournalWriter(path, num_bytes=contents.num_bytes) as writer:
            if not contents.num_bytes:
                writer.append(key.packed())
            yield StepJournal(contents, rows=rows, sink=writer)


def _plain(key: StepKey) -> dict[str, Any]:
    values = asdict(key)
    return values | values.pop("settings")


def _differing(one: Mapping[str, Any], other: Mapping[str, Any], *, prefix: str = "") -> list[str]:
    names: list[str] = []
    for name in sorted({*one, *other}):
        value, other_value = one.get(name), other.get(name)
        if isinstance(value, Mapping) and isinstance(other_value, Mapping):
            inner = cast(Mapping[str, Any], value), cast(Mapping[str, Any], other_value)
            names += _differing(*inner, prefix=f"{prefix}{name}.")
        elif value != other_value:
            names.append(f"{prefix}{name}")
    return names


def _name(group: int, rollout: int) -> str:
    return f"group={group}/rollout={rollout}"


def _without_free_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_free_keys(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name not in FREE_KEYS
    }
