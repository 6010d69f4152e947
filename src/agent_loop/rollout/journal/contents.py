"""Reading of a journal after a crash, and repair of a damaged journal."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

from agent_loop.errors import JournalError
from agent_loop.recording.record import RecordKind, RowRecord
from agent_loop.recording.values import digest, pack, unpack
from agent_loop.rollout.journal.frames import HEADER, Scan, framed, scan
from agent_loop.runtime.describe import describe_error
from agent_loop.storage.whole_file import sync_to_disk, whole_file
from agent_loop.types import Row

Rewards: TypeAlias = dict[str, dict[int | None, Mapping[str, Any]]]
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError, struct.error)
"""Errors that reading a record of another version may raise."""


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


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a journal of an earlier process."""

    records: Mapping[str, RowRecord] = field(default_factory=dict[str, RowRecord])
    """Records by row. Records after a missing record of the same row are left out."""
    rewards: Rewards = field(default_factory=dict[str, dict[int | None, Mapping[str, Any]]])
    """Results of a batch reward function, by row and branch; see `serialize_rewards`."""
    complete: Sequence[tuple[int, int]] | None = None
    """Group and rollout of each trajectory, if the rollout has ended; else None."""
    num_bytes: int = 0
    """Number of bytes of the file to keep; 0 starts a new file."""
    doubt: str | None = None
    """Reason why records of unfinished rows may be missing; None if no record can be missing."""
    notes: Sequence[str] = ()
    """Notes for the user, one line each."""


def read_contents(path: Path, *, key: StepKey, refuse: bool) -> Contents:
    """Read a journal, and repair it if it is damaged.

    A repair copies all bytes from the first damaged byte to a file beside the journal, and rewrites the journal with
    the valid records.

    Args:
        path: The file, which need not exist.
        key: Identity of the rollout.
        refuse: Whether a file of another rollout is an error. Otherwise the file is replaced, with a note.

    Raises:
        JournalError: The file cannot be read or repaired, or belongs to another rollout and `refuse` is set.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Contents()
    except OSError as error:
        raise JournalError(f"the journal {str(path)!r} cannot be read ({describe_error(error)})") from error
    try:
        found = scan(data)
        read = _SortedRecords.of(found.payloads)
    except JournalError as error:
        raise JournalError(f"{str(path)!r}: {error}") from error
    except _UNREADABLE as error:
        raise JournalError(
            f"the journal {str(path)!r} holds a record that this version of agent-loop cannot read "
            f"({describe_error(error)}); resume the run with the version that started it, or move the journal "
            "elsewhere to start from the beginning"
        ) from error
    if not found.payloads and not found.damage:
        return Contents(
            notes=[f"the journal {str(path)!r} has no records; the rollout starts from the beginning"]
        )
    if read.key is None and refuse:
        raise JournalError(
            f"the journal {str(path)!r} is damaged at byte {_first_damage(found)}, in the record that identifies the "
            "rollout, so no record can be used; the file was not changed. To start from the beginning, move the file "
            "elsewhere and run without --resume. Every row is then run again, including its calls of tools that may "
            "be used only once"
        )
    differences = [] if read.key is None else key.differences(read.key)
    if differences:
        why = f"the journal {str(path)!r} belongs to another rollout: {', '.join(differences)} changed"
        if refuse:
            raise JournalError(
                f"{why}; restore the settings to resume, or run without --resume to start from the beginning"
            )
        return Contents(notes=[f"{why}; the journal is not used"])
    if found.damage or read.key is None:
        try:
            return _repaired(path, data, found, read, key=key)
        except OSError as error:
            raise JournalError(
                f"the journal {str(path)!r} is damaged at byte {_first_damage(found)} and cannot be repaired "
                f"({describe_error(error)}); the file was not changed"
            ) from error
    return _contents(read, num_bytes=found.num_good_bytes, notes=_notes(path, found, read))


@dataclass(slots=True)
class _SortedRecords:
    """Records of a journal, sorted by kind and row."""

    key: StepKey | None = None
    records: dict[str, RowRecord] = field(default_factory=dict[str, RowRecord])
    rewards: Rewards = field(default_factory=dict[str, dict[int | None, Mapping[str, Any]]])
    complete: list[tuple[int, int]] | None = None
    doubt: str | None = None
    used: list[bytes] = field(default_factory=list[bytes])
    """Payloads of the used records, without the first record."""

    @classmethod
    def of(cls, payloads: Iterable[bytes]) -> _SortedRecords:
        records = cls()
        for payload in payloads:
            if records.add(unpack(payload)):
                records.used.append(payload)
        return records

    def add(self, payload: Mapping[str, Any]) -> bool:
        """Add the next record. Return whether the record is used.

        A duplicate record is used once. Records after a missing record of the same row are not used.
        """
        kind = RecordKind(payload["is"])
        if kind is RecordKind.STEP:
            self.key = self.key or StepKey(**payload["got"])
            return False
        if kind is RecordKind.DAMAGE:
            self.doubt = str(payload["got"])
        elif kind is RecordKind.COMPLETE:
            self.complete = [(int(group), int(rollout)) for group, rollout in payload["got"]]
        elif kind is RecordKind.REWARDS:
            for row, forms in payload["got"].items():
                self.rewards.setdefault(row, {}).update({form["branch"]: form for form in forms})
        else:
            record = self.records.setdefault(payload["row"], RowRecord())
            if payload["n"] != record.num_records:
                return False
            record.add(payload)
            if kind is RecordKind.END:  # Earlier rewards belong to other trajectories.
                self.rewards.pop(payload["row"], None)
        return True


def _contents(read: _SortedRecords, *, num_bytes: int, notes: Sequence[str]) -> Contents:
    records = {
        name: record if record.has_succeeded else replace(record, doubt=read.doubt)
        for name, record in read.records.items()
    }
    return Contents(records, read.rewards, read.complete, num_bytes, read.doubt, notes)


def _notes(path: Path, found: Scan, read: _SortedRecords) -> list[str]:
    notes: list[str] = []
    if found.num_torn_bytes:
        notes.append(
            f"the last record of the journal {str(path)!r} is incomplete; its {found.num_torn_bytes} bytes are dropped"
        )
    if read.doubt is not None:
        notes.append(f"{read.doubt}; unfinished rows fail when they call a tool that may be used only once")
    return notes


def _repaired(path: Path, data: bytes, found: Scan, read: _SortedRecords, *, key: StepKey) -> Contents:
    """Copy the damaged part to a backup file, and rewrite the journal with the usable records."""
    start = _first_damage(found)
    backup = _back_up(path, data[start:], start=start)
    if read.key is None:
        read.records, read.rewards, read.complete, read.used = {}, {}, None, []
    read.doubt = (
        f"the journal {str(path)!r} was damaged at byte {start}, and records may be missing; the damaged bytes are in "
        f"{str(backup)!r}"
    )
    # The record of the damage comes first, so that truncating the journal later does not remove it.
    payloads = [key.packed(), pack({"is": RecordKind.DAMAGE, "got": read.doubt}), *read.used]
    whole = HEADER + b"".join(map(framed, payloads))
    with whole_file(path, to_disk=True) as temporary:
        temporary.write_bytes(whole)
    num_damaged = sum(map(len, found.damage))
    notes = [
        f"the journal {str(path)!r} is damaged at byte {start}: {num_damaged} bytes cannot be read, {len(read.used)} "
        f"records are used, and all bytes from byte {start} are copied to {str(backup)!r}",
        *_notes(path, found, read)[-1:],
    ]
    return _contents(read, num_bytes=len(whole), notes=notes)


def _first_damage(found: Scan) -> int:
    """Return the position of the first byte that cannot be used."""
    return found.damage[0].start if found.damage else len(HEADER)


def _back_up(path: Path, data: bytes, *, start: int) -> Path:
    """Write the bytes to a file beside the journal. Never overwrite a file with other contents."""
    name, number = f"{path.name}.damaged-{start}", 1
    backup = path.with_name(name)
    while backup.exists() and backup.read_bytes() != data:
        number += 1
        backup = path.with_name(f"{name}-{number}")
    backup.write_bytes(data)
    sync_to_disk(backup)
    return backup


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
