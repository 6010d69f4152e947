"""What is on record of one rollout of one row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from agent_loop.chat.multimodal import Encoded
from agent_loop.episode.ledger import TokenLedger
from agent_loop.recording.serialization import deserialize_completion, deserialize_trajectories
from agent_loop.recording.values import unpack
from agent_loop.trajectory import Segment, Trajectory
from agent_loop.trajectory.codec import from_plain
from agent_loop.types import Origin, Row, StopReason


class RecordKind(StrEnum):
    """What a record says."""

    STEP = "step"
    """Which rollout the journal is of. The first record."""
    PROMPT = "prompt"
    OBSERVATION = "observation"
    INTERACTION = "interaction"
    """Tokens that the interaction, not a tool, added."""
    COMPLETION_BEGAN = "completion_began"
    """So much of it was sampled when it was cut."""
    COMPLETION = "completion"
    CALL_BEGAN = "call_began"
    CALL_ENDED = "call_ended"
    REPLY_BEGAN = "reply_began"
    REPLY = "reply"
    VERDICTS = "verdicts"
    """Verdicts of the tools when the trajectory was cut."""
    BRANCH = "branch"
    """An episode began where another one stood, or had stood."""
    RESTART = "restart"
    """The row begins anew; what was recorded of it before counts no more."""
    END = "end"
    """The row's trajectories, scored."""
    REWARDS = "rewards"
    """What a batch reward function found of rows that had ended."""
    COMPLETE = "complete"
    """The rollout is over, with these trajectories."""
    DAMAGE = "damage"
    """The journal was damaged and repaired: records of rows that did not end may be missing."""


class RecordPosition(NamedTuple):
    """Where in a row something was asked."""

    lane: int
    """The episode: the first one of the row is 0."""
    turn: int
    """The verb, counted from 0 in its episode."""
    number: int = 0
    """The call, in a turn with several."""


class RecordEntry(NamedTuple):
    """One record of a row."""

    kind: RecordKind
    place: RecordPosition
    asked: str
    """A digest of the question."""
    got: Any
    """The answer; None if it has no recorded form. Of the beginning of a call or a reply: `what` may be asked only
    once, if so."""


@dataclass(slots=True)
class RowRecord:
    """The records of one rollout of one row. Written by the reader of a journal alone."""

    entries: list[RecordEntry] = field(default_factory=list[RecordEntry])
    end: Mapping[str, Any] | None = None
    """Its trajectories, if it ended."""
    num_records: int = 0
    """Number of records so far, which is the index of the next record."""
    doubt: str | None = None
    """Why more may have happened than is on record; None if nothing can be missing."""

    @classmethod
    def of(cls, payloads: Iterable[bytes]) -> RowRecord:
        """Reads packed records.

        Raises:
            ValueError: They are none.
        """
        record = cls()
        record.extend(payloads)
        return record

    def extend(self, payloads: Iterable[bytes]) -> None:
        """Takes the row's next records, packed."""
        for payload in payloads:
            self.add(unpack(payload))

    def add(self, payload: Mapping[str, Any]) -> None:
        """Takes the row's next record, as it was unpacked."""
        kind = RecordKind(payload["is"])
        self.num_records += 1
        if kind is RecordKind.RESTART:
            self.entries, self.end = [], None
        elif kind is RecordKind.END:
            self.end = payload["got"]
        else:
            self.entries.append(
                RecordEntry(kind, RecordPosition(*payload["at"]), payload["asked"], payload["got"])
            )

    def answers(self) -> dict[RecordPosition, RecordEntry]:
        """By place; where a call began and ended, the end."""
        return {entry.place: entry for entry in self.entries}

    @property
    def has_succeeded(self) -> bool:
        """It ended, and without a failure, so that it need not be run again."""
        return self.end is not None and all(
            each["stop"] != StopReason.FAILED for each in self.end["trajectories"]
        )

    def trajectories(self, row: Row, *, group: int, rollout: int) -> list[Trajectory]:
        """The finished trajectories, their tokens as they were recorded."""
        if self.end is None:
            return []
        lanes = self._lanes() if not self.end["segments"] else {}
        return deserialize_trajectories(self.end, lanes=lanes, row=row, group=group, rollout=rollout)

    def _lanes(self) -> dict[int, Sequence[Segment]]:
        ledgers: dict[int, TokenLedger] = {}
        for kind, (lane, _, _), _, got in self.entries:
            if got is None:
                continue
            if kind is RecordKind.BRANCH:
                ledgers[lane] = ledgers[got["parent"]].fork(got["num_tokens"])
            elif kind is RecordKind.COMPLETION:
                ledgers[lane].append_completion(deserialize_completion(got))
            elif kind in _ORIGINS:
                encoded = from_plain(got, Encoded)
                ledger = ledgers.setdefault(lane, TokenLedger())
                ledger.append(encoded.token_ids, origin=_ORIGINS[kind], attachments=encoded.attachments)
        return {lane: ledger.segments() for lane, ledger in ledgers.items()}


_ORIGINS = {
    RecordKind.PROMPT: Origin.PROMPT,
    RecordKind.OBSERVATION: Origin.TOOL,
    RecordKind.INTERACTION: Origin.INTERACTION,
}
