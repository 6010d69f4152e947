"""Identity of a rollout, and reading of its journal after a crash."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from agent_loop.errors import JournalError
from agent_loop.recording.record import RecordKind, RowRecord
from agent_loop.recording.values import digest, pack, unpack
from agent_loop.rollout.journal.file import read_records
from agent_loop.runtime.describe import describe_error
from agent_loop.storage.exclusive import sync_to_disk
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
    doubt: str | None = None
    """Reason why records of unfinished rows may be missing; None if no record can be missing."""
    notes: Sequence[str] = ()
    """Notes for the user, one line each."""

    def add(self, payload: Mapping[str, Any]) -> None:
        """Add the next record of the journal."""
        kind, got = RecordKind(payload["is"]), payload.get("got")
        if kind is RecordKind.STEP:
            self.key = self.key or StepKey(**payload["got"])
        elif kind is RecordKind.DAMAGE:
            self.doubt = str(got)
        elif kind is RecordKind.COMPLETE:
            self.complete = [(int(group), int(rollout)) for group, rollout in payload["got"]]
        elif kind is RecordKind.REWARDS:
            for row, forms in payload["got"].items():
                self.rewards.setdefault(row, {}).update({form["branch"]: form for form in forms})
        else:
            record = self.records.setdefault(payload["row"], RowRecord())
            if payload["n"] != record.num_records:  # a record that was doubled, or follows a missing one
                return
            record.add(payload)
            if kind is RecordKind.END:  # Earlier rewards belong to other trajectories.
                self.rewards.pop(payload["row"], None)


def read_contents(path: Path, *, key: StepKey, refuse: bool) -> Contents:
    """Read a journal up to its first damaged record. A damaged journal is copied to a file beside it first.

    Args:
        path: The file, which need not exist.
        key: Identity of the rollout.
        refuse: Whether a file of another rollout is an error. Otherwise the file is replaced, with a note.
    """
    name, contents = f"the journal {str(path)!r}", Contents()
    try:
        data = path.read_bytes()
        found = read_records(data)
        for payload in found.payloads:
            contents.add(unpack(payload))
    except FileNotFoundError:
        return Contents()
    except JournalError as error:
        raise JournalError(f"{str(path)!r}: {error}") from error
    except _UNREADABLE as error:
        raise JournalError(
            f"{name} cannot be read by this version of agent-loop ({describe_error(error)}); resume the run with the "
            "version that started it, or move the journal elsewhere to start from the beginning"
        ) from error
    if contents.key is None and not found.is_damaged:
        return Contents(notes=[f"{name} has no records; the rollout starts from the beginning"])
    if contents.key is None and refuse:
        raise JournalError(
            f"{name} is damaged at byte {found.num_good_bytes}, in the record that identifies the rollout, so no "
            "record can be used; the file was not changed. To start from the beginning, move the file elsewhere and "
            "run without --resume. Every row is then run again, including its calls of tools that may be used only once"
        )
    differences = [] if contents.key is None else key.differences(contents.key)
    if differences:
        why = f"{name} belongs to another rollout: {', '.join(differences)} changed"
        if refuse:
            raise JournalError(
                f"{why}; restore the settings to resume, or run without --resume to start from the beginning"
            )
        return Contents(notes=[f"{why}; the journal is not used"])
    contents.num_bytes = 0 if contents.key is None else found.num_good_bytes
    notes: list[str] = []
    if found.num_torn_bytes:
        notes.append(f"the last record of {name} is incomplete; its {found.num_torn_bytes} bytes are dropped")
    if found.is_damaged:
        contents.doubt = (
            f"{name} was damaged at byte {found.num_good_bytes}, so that later records are missing; a copy of it is "
            f"{str(_back_up(path, data))!r}"
        )
    if contents.doubt is not None:
        notes.append(
            f"{contents.doubt}; unfinished rows fail when they call a tool that may be used only once"
        )
        for record in contents.records.values():
            record.doubt = None if record.has_succeeded else contents.doubt
    contents.notes = notes
    return contents


def _back_up(path: Path, data: bytes) -> Path:
    """Copy the damaged journal to a new file beside it."""
    number = 1
    while (copy := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    try:
        copy.write_bytes(data)
        sync_to_disk(copy)
    except OSError as error:
        raise JournalError(
            f"the journal {str(path)!r} is damaged and cannot be copied to {str(copy)!r} ({describe_error(error)}); "
            "the file was not changed"
        ) from error
    return copy


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
