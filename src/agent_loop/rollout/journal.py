"""Journal of one rollout: it records each turn as it happens, so that a killed run can be resumed.

The file is a header, then records, which are only appended.

    header   "agent-loop journal" and the number of the format, 32 bytes
    record   u32 length | u32 CRC-32 of the length | u32 CRC-32 of the payload | payload        (little-endian)

A process that is killed leaves a prefix of its writes, so only the last record can be incomplete. Any other invalid
record was damaged later, and its journal is refused.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

from agent_loop.config import Config
from agent_loop.errors import JournalError
from agent_loop.recording.record import RecordKind, RowRecord, Sink
from agent_loop.recording.row_log import RowLog
from agent_loop.recording.serialization import serialize_rewards, with_recorded_rewards
from agent_loop.recording.values import Unstorable, digest, pack, unpack
from agent_loop.rollout.jobs import Job
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.describe import describe_error
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

    Without `resume`, the file is replaced. A file of another rollout is an error with `refuse`, and is otherwise
    replaced, with a note. `lock` is False if the file's folder or output is already locked.
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


# -- the file ----------------------------------------------------------------------------------------------------------

FORMAT = 8
MAGIC = b"agent-loop journal ".ljust(28, b".")
HEADER = MAGIC + struct.pack("<I", FORMAT)
CLOSE_TIMEOUT_S = 60.0

_FRAME = struct.Struct("<III")
_NUMBER = struct.Struct("<I")
FRAME_BYTES = _FRAME.size
"""Number of bytes of a record before its payload."""


def framed(payload: bytes) -> bytes:
    """Return the record of a payload, as bytes for the file."""
    length = len(payload)
    return _FRAME.pack(length, zlib.crc32(_NUMBER.pack(length)), zlib.crc32(payload)) + payload


def read_records(data: bytes) -> tuple[list[bytes], int]:
    """Return the payloads of a journal, and the number of its bytes without an incomplete last record.

    Raises:
        JournalError: The file is not a journal of this format, or a record was damaged after it had been written.
    """
    if HEADER.startswith(data):
        return [], len(data) if data == HEADER else 0
    _check_header(data)
    payloads: list[bytes] = []
    start = len(HEADER)
    while start + FRAME_BYTES <= len(data):
        length, length_checksum, checksum = _FRAME.unpack_from(data, start)
        is_damaged = length_checksum != zlib.crc32(_NUMBER.pack(length))
        end = start + FRAME_BYTES + length
        if not is_damaged and end > len(data):
            break
        payload = data[start + FRAME_BYTES : end]
        if is_damaged or checksum != zlib.crc32(payload):
            raise JournalError(
                f"the journal is damaged at byte {start}; restore the file from a copy, or move it elsewhere to start "
                "from the beginning. Every row is then run again, including its calls of tools that may be used only "
                "once"
            )
        payloads.append(payload)
        start = end
    return payloads, start


def _check_header(data: bytes) -> None:
    if data.startswith(HEADER):
        return
    if data.startswith(MAGIC):
        (found,) = _NUMBER.unpack_from(data.ljust(len(HEADER), b"\0"), len(MAGIC))
        raise JournalError(
            f"the journal has format {found}, and this version of agent-loop reads {FORMAT}; resume the run with the "
            "version that started it, or move the journal elsewhere to start from the beginning"
        )
    raise JournalError(
        "the file is not a journal, or its first bytes are damaged; it was not changed. Give the path of a journal, or "
        "move the file elsewhere to start from the beginning"
    )


class JournalWriter:
    """Writer of one journal. Use it with `async with`.

    Records reach the operating system at once. They reach the disk (fsync) when a caller waits with `to_disk`, and when
    the writer is closed. If a write fails, the incomplete record is removed from the file, and later records are
    refused.
    """

    def __init__(self, path: Path, *, num_bytes: int = 0) -> None:
        self.path = path
        self._num_bytes = num_bytes
        self._error: JournalError | None = None
        self._file = -1

    async def __aenter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._file, self._num_bytes)
            os.lseek(self._file, 0, os.SEEK_END)
            if not self._num_bytes:
                self._write(HEADER)
        except OSError as error:
            self._close()
            raise self._describe(error) from error
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            await run_shielded(partial(self.flushed, to_disk=True), timeout_s=CLOSE_TIMEOUT_S)
        except JournalError:
            if error is None:
                raise
        finally:
            self._close()

    def append(self, payload: bytes) -> None:
        if self._error is None:
            try:
                self._write(framed(payload))
            except OSError as error:
                self._error = self._describe(error)
        if self._error is not None:
            raise self._error

    async def flushed(self, *, to_disk: bool = False) -> None:
        if to_disk and self._error is None:
            try:
                await run_in_thread(os.fsync, self._file)
            except OSError as error:
                self._error = self._describe(error)
        if self._error is not None:
            raise self._error

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self._num_bytes)
            os.lseek(self._file, self._num_bytes, os.SEEK_SET)
            raise
        self._num_bytes += len(data)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _describe(self, error: OSError) -> JournalError:
        described = JournalError(
            f"the journal {str(self.path)!r} cannot be written ({describe_error(error)}); its earlier records are "
            "intact. Fix the cause and resume, or disable the journal with rollout.journal=false"
        )
        described.__cause__ = error
        return described


# -- the folder ------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"step-(\d{6,})(?:\.refill-\d+|\.forks)?\.journal")


class JournalFolder:
    """Journals of a training run: one file per step since the last checkpoint."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "journal"

    def file(self, step: int, *, refill: int = 0, is_of_forks: bool = False) -> Path:
        """Return the path of the journal of a step. Each refill of a step, and its forks, have separate journals."""
        suffix = ".forks" if is_of_forks else f".refill-{refill}" if refill else ""
        return self.path / f"step-{step:06d}{suffix}.journal"

    def drop_through(self, step: int) -> None:
        """Remove the journals of all steps up to `step`, which a checkpoint contains."""
        self._drop(lambda each: each <= step)

    def drop_after(self, step: int) -> list[int]:
        """Remove the journals of the steps after `step`, whose weights are lost. Return these steps, in order."""
        return self._drop(lambda each: each > step)

    def _drop(self, is_old: Callable[[int], bool]) -> list[int]:
        dropped: set[int] = set()
        for path in self.path.glob("*.journal"):
            name = _NAME.fullmatch(path.name)
            if name and is_old(int(name[1])):
                path.unlink(missing_ok=True)
                dropped.add(int(name[1]))
        return sorted(dropped)
