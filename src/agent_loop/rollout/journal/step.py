"""The journal of one rollout: what it is of, what it holds from before a crash, and what is added to it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from agent_loop.boundary import describe_error
from agent_loop.config import Config
from agent_loop.errors import JournalError
from agent_loop.recording.record import Kind, RowRecord
from agent_loop.recording.row_log import RowLog
from agent_loop.recording.sink import Sink
from agent_loop.recording.values import digest, pack, unpack
from agent_loop.rollout.journal.frames import Scan, scan
from agent_loop.rollout.journal.writer import JournalWriter
from agent_loop.rollout.worker import Job
from agent_loop.threads import run_in_thread
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row

logger = logging.getLogger(__name__)

FREE_KEYS = frozenset(
    {
        "num_servers", "server_urls", "start_timeout_s", "request_timeout_s", "weight_transfer", "free_cache_engine",
        "max_concurrent", "max_failed_share", "journal", "num_workers", "trust_remote_code", "device", "watchdog_s",
        "longest_first", "on_weight_update",
    }
)  # fmt: skip
"""Settings of the rollout that may change between a crash and the resume: no token depends on them."""


@dataclass(frozen=True, slots=True)
class StepKey:
    """What a journal is of. Another rollout cannot go on from it."""

    step: int
    weight_version: int
    num_samples: int
    """Of each row."""
    rows: str
    """A digest."""
    settings: Mapping[str, Any]
    """What else its tokens depend on."""

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
        """The key of a rollout of these rows."""
        return cls(
            step=step,
            weight_version=weight_version,
            num_samples=num_samples,
            rows=digest([dict(row) for row in rows]),
            settings=settings,
        )

    def differences(self, other: StepKey) -> list[str]:
        """The names of what is not the same."""
        return _differing(_plain(self), _plain(other))


def rollout_settings(config: Config) -> dict[str, Any]:
    """The settings on which the tokens of a rollout depend."""
    return _without_free_keys(config.model_dump(mode="json", include={"model", "rollout", "reward"}))


def training_settings(config: Config) -> dict[str, Any]:
    """The settings on which the weights of a training, and so the tokens of its rollouts, depend."""
    return rollout_settings(config) | config.model_dump(mode="json", include={"algorithm", "actor"})


class StepJournal:
    """The journal of one rollout while it is written. Made by `open_journal`.

    Rows that ended are not run again; the others get a log that answers from the record first.
    """

    def __init__(self, contents: Contents, *, rows: Sequence[Row], sink: Sink) -> None:
        self.notes = contents.notes
        """What a person should know of it, one line each."""
        self._records = contents.records
        self._complete = contents.complete
        self._rows = rows
        self._sink = sink

    @property
    def num_ended(self) -> int:
        """Rollouts on record that need not be run again."""
        return sum(record.has_succeeded for record in self._records.values())

    @property
    def is_complete(self) -> bool:
        """All of the rollout is on record."""
        places = self._complete
        return places is not None and all(self._record(*place).end is not None for place in places)

    def outcome(self) -> list[Trajectory] | None:
        """The trajectories of the rollout, if all of it is on record."""
        if self._complete is None or not self.is_complete:
            return None
        return [
            trajectory
            for group, rollout in self._complete
            for trajectory in self._record(group, rollout).trajectories(
                self._rows[group], group=group, rollout=rollout
            )
        ]

    def divide(self, jobs: Sequence[Job]) -> tuple[list[Trajectory], list[Job]]:
        """The trajectories of the jobs that are on record to their end, and the other jobs, each with its log.

        A trajectory that failed is run again.
        """
        ended: list[Trajectory] = []
        rest: list[Job] = []
        for job in jobs:
            record = self._record(job.group, job.rollout)
            if record.has_succeeded:
                ended += record.trajectories(job.row, group=job.group, rollout=job.rollout)
            else:
                rest.append(replace(job, log=RowLog(job.place, sink=self._sink, record=record)))
        return ended, rest

    async def complete(self, trajectories: Sequence[Trajectory]) -> None:
        """Says that the rollout is over, with these trajectories."""
        places = dict.fromkeys((t.group, t.rollout) for t in trajectories)
        self._sink.append(pack({"is": Kind.COMPLETE, "got": list(places)}))
        await self._sink.flushed()

    def _record(self, group: int, rollout: int) -> RowRecord:
        return self._records.get(_name(group, rollout)) or RowRecord()


@asynccontextmanager
async def open_journal(
    path: Path, *, key: StepKey, rows: Sequence[Row], resume: bool, refuse: bool = False
) -> AsyncGenerator[StepJournal]:
    """The journal of a rollout of `rows`; what is written to it is on the disk when the context ends.

    Args:
        path: The file.
        key: What the rollout is.
        resume: Go on from what the file holds; else it begins anew.
        refuse: Whether a file that is of another rollout is an error; else it is replaced, and a note says so.

    Raises:
        JournalError: The file cannot be read or written, or is of another rollout and `refuse` is set.
    """
    contents = Contents.nothing()
    if resume:
        contents = await run_in_thread(_read_contents, path, key, refuse)
    for note in contents.notes:
        logger.warning("%s", note)
    async with JournalWriter(path, num_bytes=contents.num_bytes) as writer:
        if not contents.num_bytes:
            writer.append(pack({"is": Kind.STEP, "got": asdict(key)}))
        yield StepJournal(contents, rows=rows, sink=writer)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a journal holds from before."""

    records: Mapping[str, RowRecord]
    complete: Sequence[tuple[int, int]] | None
    """Group and rollout of each trajectory of a rollout that is over."""
    num_bytes: int
    notes: Sequence[str] = ()

    @classmethod
    def nothing(cls, *notes: str) -> Contents:
        return cls(records={}, complete=None, num_bytes=0, notes=notes)


def _read_contents(path: Path, key: StepKey, refuse: bool) -> Contents:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Contents.nothing()
    except OSError as error:
        raise JournalError(f"the journal {str(path)!r} cannot be read ({describe_error(error)})") from error
    try:
        found = scan(data)
        if not found.payloads:
            return Contents.nothing()
        first, *rest = map(unpack, found.payloads)
        differences = key.differences(StepKey(**first["got"]))
    except JournalError as error:
        raise JournalError(f"{str(path)!r}: {error}") from error
    if differences:
        why = f"the journal {str(path)!r} is of another rollout: {', '.join(differences)} changed"
        if refuse:
            raise JournalError(f"{why}; run as before to resume it, or without --resume to begin anew")
        return Contents.nothing(f"{why}; it is not used")
    return _grouped(rest, found, notes=_notes(path, data, found))


def _grouped(payloads: Sequence[Mapping[str, Any]], found: Scan, *, notes: Sequence[str]) -> Contents:
    records: dict[str, RowRecord] = {}
    complete: list[tuple[int, int]] | None = None
    for payload in payloads:
        if Kind(payload["is"]) is Kind.COMPLETE:
            complete = [(group, rollout) for group, rollout in payload["got"]]
        else:
            records.setdefault(payload["row"], RowRecord()).add(payload)
    return Contents(records, complete, found.num_good_bytes, notes)


def _notes(path: Path, data: bytes, found: Scan) -> list[str]:
    if found.num_torn_bytes:
        return [
            f"the last record of the journal {str(path)!r} was not written to its end; {found.num_torn_bytes} bytes "
            "are dropped"
        ]
    if found.num_damaged_bytes:
        aside = path.with_name(f"{path.name}.damaged-{found.num_good_bytes}")
        aside.write_bytes(data[found.num_good_bytes :])
        return [
            f"the journal {str(path)!r} is damaged at byte {found.num_good_bytes}: that record and "
            f"{found.num_records_after_damage} behind it are not used, and are kept in {aside.name!r}; their rows "
            "go on from before, or begin anew"
        ]
    return []


def _name(group: int, rollout: int) -> str:
    return f"group={group}/rollout={rollout}"


def _plain(key: StepKey) -> dict[str, Any]:
    values = asdict(key)
    return values | values.pop("settings")


def _differing(one: Mapping[str, Any], other: Mapping[str, Any], *, prefix: str = "") -> list[str]:
    names: list[str] = []
    for name in sorted({*one, *other}):
        mine, its = one.get(name), other.get(name)
        if isinstance(mine, Mapping) and isinstance(its, Mapping):
            inner = cast(Mapping[str, Any], mine), cast(Mapping[str, Any], its)
            names += _differing(*inner, prefix=f"{prefix}{name}.")
        elif mine != its:
            names.append(f"{prefix}{name}")
    return names


def _without_free_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_free_keys(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name not in FREE_KEYS
    }
