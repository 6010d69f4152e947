"""Reads what a journal holds from before a crash, and repairs a journal that was damaged."""

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
"""Errors from reading a record that another version wrote."""


@dataclass(frozen=True, slots=True)
class StepKey:
    """Identity of the rollout that a journal belongs to. Another rollout cannot resume from the journal."""

    step: int
    weight_version: int
    num_samples: int
    """Trajectories per row."""
    rows: str
    """A digest."""
    settings: Mapping[str, Any]
    """Other settings that its tokens depend on."""

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
    """By row, without what follows a missing record of that row."""
    rewards: Rewards = field(default_factory=dict[str, dict[int | None, Mapping[str, Any]]])
    """Results of a batch reward function, by row and branch; see `serialize_rewards`."""
    complete: Sequence[tuple[int, int]] | None = None
    """Group and rollout of each trajectory of a rollout that is over."""
    num_bytes: int = 0
    """Bytes of the file that are kept; 0 starts a new file."""
    doubt: str | None = None
    """Why records of rows that did not end may be missing; None if none can be."""
    notes: Sequence[str] = ()
    """Notes for the user, one line each."""


def read_contents(path: Path, *, key: StepKey, refuse: bool) -> Contents:
    """Read a journal, and repair it if it is damaged.

    A repair copies all bytes from the first damage on to a file beside the journal, and writes the valid records again.

    Args:
        path: The file, which need not exist.
        key: Identity of the rollout.
        refuse: Whether a file that does not belong to this rollout is an error. Otherwise it is replaced, with a note.

    Raises:
        JournalError: The file cannot be read or repaired, or is of another rollout and `refuse` is set.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Contents()
    except OSError as error:
        raise JournalError(f"the journal {str(path)!r} cannot be read ({describe_error(error)})") from error
    try:
        found = scan(data)
        read = _Reading.of(found.payloads)
    except JournalError as error:
        raise JournalError(f"{str(path)!r}: {error}") from error
    except _UNREADABLE as error:
        raise JournalError(
            f"the journal {str(path)!r} holds a record that this version of agent-loop cannot read "
            f"({describe_error(error)}); resume the run with the version that began it, or move the journal elsewhere "
            "to begin anew"
        ) from error
    if not found.payloads and not found.damage:
        return Contents(notes=[f"the journal {str(path)!r} holds no record; the rollout begins anew"])
    if read.key is None and refuse:
        raise JournalError(
            f"the journal {str(path)!r} is damaged at byte {_first_damage(found)}, in the record that says which "
            "rollout it is of, so nothing in it can be used; it was left as it is. To begin anew, move it elsewhere "
            "and run without --resume: every row is run again then, tools that are to be used only once included"
        )
    differences = [] if read.key is None else key.differences(read.key)
    if differences:
        why = f"the journal {str(path)!r} is of another rollout: {', '.join(differences)} changed"
        if refuse:
            raise JournalError(f"{why}; run as before to resume it, or without --resume to begin anew")
        return Contents(notes=[f"{why}; it is not used"])
    if found.damage or read.key is None:
        try:
            return _repaired(path, data, found, read, key=key)
        except OSError as error:
            raise JournalError(
                f"the journal {str(path)!r} is damaged at byte {_first_damage(found)} and cannot be repaired "
                f"({describe_error(error)}); it was left as it is"
            ) from error
    return _contents(read, num_bytes=found.num_good_bytes, notes=_notes(path, found, read))


@dataclass(slots=True)
class _Reading:
    """The records of a journal, sorted."""

    key: StepKey | None = None
    records: dict[str, RowRecord] = field(default_factory=dict[str, RowRecord])
    rewards: Rewards = field(default_factory=dict[str, dict[int | None, Mapping[str, Any]]])
    complete: list[tuple[int, int]] | None = None
    doubt: str | None = None
    used: list[bytes] = field(default_factory=list[bytes])
    """The payloads that are used, without the first."""

    @classmethod
    def of(cls, payloads: Iterable[bytes]) -> _Reading:
        reading = cls()
        for payload in payloads:
            if reading.add(unpack(payload)):
                reading.used.append(payload)
        return reading

    def add(self, payload: Mapping[str, Any]) -> bool:
        """Add the next record, and return whether it is used.

        A record that is in the file twice is used once. Records after a missing record of their row are not used.
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
            if kind is RecordKind.END:  # rewards of before are of other trajectories
                self.rewards.pop(payload["row"], None)
        return True


def _contents(read: _Reading, *, num_bytes: int, notes: Sequence[str]) -> Contents:
    records = {
        name: record if record.has_succeeded else replace(record, doubt=read.doubt)
        for name, record in read.records.items()
    }
    return Contents(records, read.rewards, read.complete, num_bytes, read.doubt, notes)


def _notes(path: Path, found: Scan, read: _Reading) -> list[str]:
    notes: list[str] = []
    if found.num_torn_bytes:
        notes.append(
            f"the last record of the journal {str(path)!r} was not written to its end; {found.num_torn_bytes} bytes "
            "are dropped"
        )
    if read.doubt is not None:
        notes.append(
            f"{read.doubt}; rows that did not end fail where they come to a tool that is to be used only once"
        )
    return notes


def _repaired(path: Path, data: bytes, found: Scan, read: _Reading, *, key: StepKey) -> Contents:
    """Keep the damaged part aside and write the journal anew with the records that can be used."""
    start = _first_damage(found)
    aside = _kept_aside(path, data[start:], start=start)
    if read.key is None:
        read.records, read.rewards, read.complete, read.used = {}, {}, None, []
    read.doubt = (
        f"the journal {str(path)!r} was damaged at byte {start}, and records may be missing; what was there is in "
        f"{str(aside)!r}"
    )
    # The mark comes first: a repaired journal that is cut off later keeps it.
    payloads = [key.packed(), pack({"is": RecordKind.DAMAGE, "got": read.doubt}), *read.used]
    whole = HEADER + b"".join(map(framed, payloads))
    with whole_file(path, to_disk=True) as temporary:
        temporary.write_bytes(whole)
    num_damaged = sum(map(len, found.damage))
    notes = [
        f"the journal {str(path)!r} is damaged at byte {start}: {num_damaged} bytes cannot be read, {len(read.used)} "
        f"records are used, and all that followed is kept in {str(aside)!r}",
        *_notes(path, found, read)[-1:],
    ]
    return _contents(read, num_bytes=len(whole), notes=notes)


def _first_damage(found: Scan) -> int:
    """Return the first byte that cannot be used."""
    return found.damage[0].start if found.damage else len(HEADER)


def _kept_aside(path: Path, data: bytes, *, start: int) -> Path:
    """Write the bytes to a file beside the journal that is not there yet, or holds the same."""
    name, number = f"{path.name}.damaged-{start}", 1
    aside = path.with_name(name)
    while aside.exists() and aside.read_bytes() != data:
        number += 1
        aside = path.with_name(f"{name}-{number}")
    aside.write_bytes(data)
    sync_to_disk(aside)
    return aside


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
