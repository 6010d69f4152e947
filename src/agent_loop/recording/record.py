"""Records of one rollout of one row, and their receivers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from agent_loop.recording.serialization import deserialize_trajectories
from agent_loop.recording.values import unpack
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row, StopReason


class RecordKind(StrEnum):
    """Kind of a record."""

    STEP = "step"
    """Identity of the rollout that the journal belongs to. The first record."""
    PROMPT = "prompt"
    OBSERVATION = "observation"
    """Tokens of a reply to the model."""
    COMPLETION_BEGAN = "completion_began"
    """Tokens that were sampled before the completion was aborted."""
    COMPLETION = "completion"
    CALL_BEGAN = "call_began"
    CALL_ENDED = "call_ended"
    REPLY_BEGAN = "reply_began"
    REPLY = "reply"
    VERDICTS = "verdicts"
    """Rewards of the tools when the trajectory was interrupted."""
    BRANCH = "branch"
    """An episode that begins with the first tokens of another episode."""
    RESUMED = "resumed"
    """All records of the cancelled run that the row resumes."""
    RESTART = "restart"
    """The row starts again. Its earlier records are ignored."""
    END = "end"
    """The row's scored trajectories."""
    REWARDS = "rewards"
    """Results of a batch reward function for rows that had ended."""
    COMPLETE = "complete"
    """The rollout ended, with the group and rollout of each trajectory."""


class RecordPosition(NamedTuple):
    """Position of a request in a row."""

    episode: int
    """Index of the episode in the row."""
    turn: int
    """Index of the operation in the episode, such as a completion."""
    number: int = 0
    """Index of the call in a turn with several calls."""


class RecordEntry(NamedTuple):
    """One record of a row."""

    kind: RecordKind
    position: RecordPosition
    asked: str
    """Digest of the request."""
    got: Any
    """The response; None if it cannot be recorded.

    The record of the start of a call or a reply has a mapping here if the tool or interaction can be used only once.
    Its key `what` names the tool or interaction."""

    def as_record(self) -> dict[str, Any]:
        """Return the entry as the content of a record."""
        return {"is": self.kind, "at": self.position, "asked": self.asked, "got": self.got}


@dataclass(slots=True)
class RowRecord:
    """Records of one rollout of one row. Only the reader of a journal adds records."""

    entries: list[RecordEntry] = field(default_factory=list[RecordEntry])
    end: Mapping[str, Any] | None = None
    """Serialized trajectories of the row if it has ended; else None."""

    @classmethod
    def of(cls, payloads: Iterable[bytes]) -> RowRecord:
        """Return the row record of packed records."""
        record = cls()
        record.extend(payloads)
        return record

    def extend(self, payloads: Iterable[bytes]) -> None:
        """Add the row's next records, in packed form."""
        for payload in payloads:
            self.add(unpack(payload))

    def add(self, payload: Mapping[str, Any]) -> None:
        """Add the row's next record, in unpacked form."""
        kind = RecordKind(payload["is"])
        if kind is RecordKind.RESTART:
            self.entries, self.end = [], None
        elif kind is RecordKind.END:
            self.end = payload["got"]
        elif kind is RecordKind.RESUMED:
            self.entries += RowRecord.of(payload["got"]).entries
        else:
            self.entries.append(
                RecordEntry(kind, RecordPosition(*payload["at"]), payload["asked"], payload["got"])
            )

    def entries_by_position(self) -> dict[RecordPosition, RecordEntry]:
        """Return the last entry of each position. For a call that began and ended, that is its end."""
        return {entry.position: entry for entry in self.entries}

    @property
    def has_succeeded(self) -> bool:
        """Whether the row ended without a failure. Such a row is not run again."""
        return self.end is not None and all(
            each["stop_reason"] != StopReason.FAILED for each in self.end["trajectories"]
        )

    def trajectories(self, row: Row, *, group: int, rollout: int) -> list[Trajectory]:
        """Return the trajectories of a row that has ended."""
        if self.end is None:
            return []
        return deserialize_trajectories(self.end, row=row, group=group, rollout=rollout)


class Sink(Protocol):
    """Receiver of records, in order."""

    def append(self, payload: bytes) -> None:
        """Append a record."""
        ...

    async def flushed(self, *, to_disk: bool = False) -> None:
        """Wait until the operating system has every record, so that a crash of the process loses no record.

        Args:
            to_disk: Wait until the records are on the disk too, so that a power failure loses no record.
        """
        ...
