"""Log of one rollout of one row. It returns recorded turns first, then records new turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from agent_loop.chat.multimodal import Encoded
from agent_loop.episode.turn_log import ReplayMismatch, TurnLog
from agent_loop.interactions.session import InteractionReply
from agent_loop.recording import serialization
from agent_loop.recording.record import RecordEntry, RecordKind, RecordPosition, RowRecord, Sink
from agent_loop.recording.serialization import deserialize_completion, serialize_completion
from agent_loop.recording.values import Unstorable, digest, pack
from agent_loop.runtime.concurrency import CallAborted
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import ToolResponse
from agent_loop.tools.results import ToolResult
from agent_loop.trajectory import Incident, IncidentKind, Segment, Trajectory
from agent_loop.trajectory.codec import from_plain, to_plain
from agent_loop.types import Message, SamplingParams, TokenIds, TokenOutput, ToolCall, as_token_ids

logger = logging.getLogger(__name__)
AnswerT = TypeVar("AnswerT")

NOT_RUN = frozenset({IncidentKind.UNKNOWN_TOOL, IncidentKind.INVALID_ARGUMENTS})
"""Incidents of calls that did not reach the tool."""


AFTER_ALL_TURNS = -1
"""Turn in the record of the tools' rewards at an interruption. The last record of this turn is used."""

BEGINNINGS = {
    RecordKind.COMPLETION_BEGAN: RecordKind.COMPLETION,
    RecordKind.CALL_BEGAN: RecordKind.CALL_ENDED,
    RecordKind.REPLY_BEGAN: RecordKind.REPLY,
}
"""Kind of the record that follows each start, unless the run is interrupted."""


class RowLog:
    """Log of one row, used by one attempt at a time. Single use.

    Args:
        trajectory_id: `group=.../rollout=...`.
        sink: Receives new records.
        record: Records from before a crash or a cancellation.
        cancellation: Once this event is set, completions, calls and replies without a record raise `CallAborted`.
    """

    def __init__(
        self,
        trajectory_id: str,
        *,
        sink: Sink,
        record: RowRecord | None = None,
        cancellation: asyncio.Event | None = None,
    ) -> None:
        self.mismatch: str | None = None
        """Reason why the record cannot be replayed, so that the row has to start again; else None."""
        self.only_once: str | None = None
        """Tool or interaction that can be used only once and may have been used. The row then cannot start again."""
        self.is_cut = False
        """Whether a cancellation interrupted the restoration of recorded state."""
        self._row = trajectory_id
        self._sink = sink
        self._cancellation = cancellation
        self.record = record or RowRecord()
        """Records to replay."""
        self._answers: Mapping[RecordPosition, RecordEntry] = self.record.entries_by_position()
        for entry in self.record.entries:
            if entry.kind in (RecordKind.CALL_BEGAN, RecordKind.REPLY_BEGAN) and entry.got is not None:
                self.only_once = str(entry.got["what"])
        self._claimed: set[int] = set()
        """Numbers of the episodes that have begun."""
        self._num_records = self.record.num_records
        self._held: dict[int, tuple[Sequence[Segment], int]] = {}

    def extended(self, payloads: Iterable[bytes]) -> RowLog:
        """Return the log of the row's next attempt, with the records that another process appended."""
        record = replace(self.record, entries=list(self.record.entries))
        record.extend(payloads)
        return RowLog(self._row, sink=self._sink, record=record)

    def new_episode(self) -> EpisodeLog:
        """Return the log of a new episode of the row."""
        return EpisodeLog(self)

    def restart(self, *, why: str | None) -> None:
        """Discard all records. The next attempt starts from the beginning.

        Args:
            why: Why the row starts again.
        """
        self._append({"is": RecordKind.RESTART, "why": why})
        self._answers = {}
        self._claimed.clear()
        self._held.clear()
        self.mismatch = None

    async def end(self, trajectories: Sequence[Trajectory]) -> None:
        """Record the row's result. After this returns, the result survives a crash of the process."""
        try:
            form = serialization.serialize_trajectories(trajectories, find_episode=self._find_episode)
            self._append({"is": RecordKind.END, "got": form})
        except Unstorable as error:
            logger.warning("%s cannot be recorded as finished: its result contains %s", self._row, error)
        await self._sink.flushed()

    # -- for its episodes ------------------------------------------------------------------------------------------

    def claim_number(self, kind: RecordKind, asked: str) -> int:
        """Return the number of an episode that begins with this request.

        That is the number of the first recorded episode with the same beginning, since concurrent episodes may begin
        in another order than before; without one, the next number.
        """
        number = next(n for n in count() if n not in self._claimed)
        for position, entry in self._answers.items():
            is_beginning = position.turn == 0 and position.number == 0
            if (
                is_beginning
                and position.episode not in self._claimed
                and (entry.kind, entry.asked) == (kind, asked)
            ):
                number = position.episode
                break
        self._claimed.add(number)
        return number

    def recorded(self, kind: RecordKind, position: RecordPosition, asked: str) -> RecordEntry | None:
        """Return the record at a position, or None if there is no record.

        Raises:
            ReplayMismatch: The recorded request differs.
            CallAborted: There is no record, and the row is cancelled.
        """
        if self.mismatch is not None:
            raise ReplayMismatch(self.mismatch)
        entry = self._answers.get(position)
        if entry is None:
            if self._is_cancelled and kind in BEGINNINGS.values():
                raise CallAborted
            return None
        if BEGINNINGS.get(entry.kind, entry.kind) is not kind or entry.asked != asked:
            raise self.mismatched(
                f"turn {position.turn} of episode {position.episode} requests another {kind.replace('_', ' ')} than "
                f"the recorded {entry.kind.replace('_', ' ')}; the loop is not deterministic, or its code was changed"
            )
        if entry.got is None and entry.kind not in (RecordKind.CALL_BEGAN, RecordKind.REPLY_BEGAN):
            raise self.mismatched(f"the response at turn {position.turn} could not be recorded")
        return entry

    def mismatched(self, why: str) -> ReplayMismatch:
        """Return the error that ends this attempt. All its later requests get the same error."""
        self.mismatch = self.mismatch or why
        return ReplayMismatch(self.mismatch)

    def keep(self, kind: RecordKind, position: RecordPosition, *, asked: str, got: Any) -> None:
        """Append a record of this row."""
        record = {"is": kind, "at": position, "asked": asked, "got": got}
        try:
            self._append(record)
        except Unstorable as error:
            logger.warning(
                "%s: the %s at turn %d cannot be recorded: it contains %s",
                self._row,
                kind,
                position.turn,
                error,
            )
            self._append({**record, "got": None})

    def take_over(self, payload: bytes) -> None:
        """Append a packed record that another process wrote for this row."""
        self._sink.append(payload)

    async def flushed(self, *, to_disk: bool = False) -> None:
        """Wait until all records survive a crash of this process or, with `to_disk`, of this machine."""
        await self._sink.flushed(to_disk=to_disk)

    def hold(self, segments: Sequence[Segment], *, episode: int) -> None:
        """Note that an episode recorded the tokens of these segments."""
        self._held[id(segments)] = (segments, episode)

    @property
    def _is_cancelled(self) -> bool:
        return self.is_cut or (self._cancellation is not None and self._cancellation.is_set())

    def _find_episode(self, segments: Sequence[Segment]) -> int | None:
        held = self._held.get(id(segments))
        return None if held is None else held[1]

    def _append(self, record: Mapping[str, Any]) -> None:
        """Append a record with the row's next number. The reader detects missing records by their numbers."""
        self._sink.append(pack({**record, "row": self._row, "n": self._num_records}))
        self._num_records += 1


class EpisodeLog:
    """Log of one episode. Implements `TurnLog`."""

    def __init__(self, row: RowLog) -> None:
        self._row = row
        self._number = -1
        """Number of the episode, known from its first request on."""
        self._num_turns = 0
        self._num_tokens = 0
        self._lost: str | None = None
        """Tool whose replies were replayed although its state was not restored; None if there is none."""

    def position(self) -> int:
        return self._num_tokens

    def branch(self, *, at: int) -> TurnLog:
        episode = self._row.new_episode()
        parent = {"parent": self._number, "num_tokens": at}
        asked = digest(parent)
        episode._claim_number(RecordKind.BRANCH, asked)
        position = episode._position(episode.next_turn())
        if self._row.recorded(RecordKind.BRANCH, position, asked) is None:
            self._row.keep(RecordKind.BRANCH, position, asked=asked, got=parent)
        episode._num_tokens = at
        return episode

    def next_turn(self) -> int:
        self._num_turns += 1
        return self._num_turns - 1

    async def tokens(
        self, messages: Sequence[Message], *, encode: Callable[[], Awaitable[Encoded]]
    ) -> Encoded:
        kind, asked = RecordKind.PROMPT if not self._num_tokens else _kind_of(messages), digest(messages)
        self._claim_number(kind, asked)
        position = self._position(self.next_turn())
        entry = self._row.recorded(kind, position, asked)
        if entry is None:
            encoded = await encode()
            self._row.keep(kind, position, asked=asked, got=to_plain(encoded))
        else:
            encoded = from_plain(_got(entry), Encoded)
        self._num_tokens += len(encoded.token_ids)
        return encoded

    async def completion(
        self,
        params: SamplingParams,
        *,
        num_context: int,
        prefix: TokenIds,
        sample: Callable[[TokenOutput | None], Awaitable[TokenOutput]],
    ) -> TokenOutput:
        prefix_ids = as_token_ids(prefix)
        request = f"{num_context} {params}" + (f" {prefix_ids.tolist()}" if len(prefix_ids) else "")
        position, asked = self._position(self.next_turn()), digest(request)
        entry = self._row.recorded(RecordKind.COMPLETION, position, asked)
        output = None if entry is None else deserialize_completion(_got(entry))
        if output is None or output.stop_reason == "aborted":
            rest = await sample(output)
            output = rest if output is None else output.then(rest)
            is_cut = output.stop_reason == "aborted"
            kind = RecordKind.COMPLETION_BEGAN if is_cut else RecordKind.COMPLETION
            self._row.keep(kind, position, asked=asked, got=serialize_completion(output, prefix=prefix_ids))
            if is_cut:
                return output
        self._num_tokens += len(prefix_ids) + len(output.token_ids)
        return output

    async def tool_result(
        self,
        call: ToolCall,
        *,
        turn: int,
        number: int,
        on_replay: OnReplay,
        is_read_later: bool,
        execute: Callable[[], Awaitable[ToolResult]],
        prepare: Callable[[], Awaitable[object]],
    ) -> ToolResult:
        position, asked = self._position(turn, number), digest([call.name, call.arguments])
        entry = self._row.recorded(RecordKind.CALL_ENDED, position, asked)
        what = f"tool {call.name!r}"
        if entry is not None and entry.kind is RecordKind.CALL_ENDED:
            result = from_plain(_got(entry), ToolResult)
            if result.incident is None or result.incident.kind not in NOT_RUN:
                is_read_later = is_read_later and call.name not in self.kept_verdicts()
                await self._rebuild(
                    what, on_replay, is_read_later=is_read_later, again=execute, prepare=prepare
                )
            return result
        self._refuse_if_state_is_lost(what, on_replay)
        if entry is None:
            await self._begin(what, RecordKind.CALL_BEGAN, position, asked, on_replay)
            result = await execute()
        elif on_replay is OnReplay.ONCE:
            result = _interrupted(call)
        else:
            self._refuse_if_lost(what, on_replay)
            result = await execute()
        self._row.keep(RecordKind.CALL_ENDED, position, asked=asked, got=to_plain(result))
        return result

    async def interaction_reply(
        self,
        *,
        num_messages: int,
        on_replay: OnReplay,
        respond: Callable[[], Awaitable[InteractionReply]],
        prepare: Callable[[], Awaitable[object]],
    ) -> InteractionReply:
        position, asked = self._position(self.next_turn()), str(num_messages)
        entry = self._row.recorded(RecordKind.REPLY, position, asked)
        what = "the interaction"
        if entry is not None and entry.kind is RecordKind.REPLY:
            await self._rebuild(what, on_replay, again=respond, prepare=prepare)
            return from_plain(_got(entry), InteractionReply)
        if entry is None:
            await self._begin(what, RecordKind.REPLY_BEGAN, position, asked, on_replay)
        elif on_replay is OnReplay.ONCE:
            raise self._row.mismatched(
                "the interaction was interrupted while it replied, and can be used only once"
            )
        else:
            self._refuse_if_lost(what, on_replay)
        reply = await respond()
        self._row.keep(RecordKind.REPLY, position, asked=asked, got=to_plain(reply))
        return reply

    is_kept = True

    def keep_verdicts(self, verdicts: Mapping[str, float | None]) -> None:
        got = {**self.kept_verdicts(), **verdicts}
        self._row.keep(RecordKind.VERDICTS, self._position(AFTER_ALL_TURNS), asked="", got=got)

    def kept_verdicts(self) -> Mapping[str, float | None]:
        position = self._position(AFTER_ALL_TURNS)
        entry = self._row.recorded(RecordKind.VERDICTS, position, "")
        return {} if entry is None else _got(entry)

    def link_segments(self, segments: Sequence[Segment]) -> None:
        # A prompt or an observation over the length limit is on record, but is not part of the episode's tokens.
        if sum(map(len, segments)) == self._num_tokens:
            self._row.hold(segments, episode=self._number)

    def _claim_number(self, kind: RecordKind, asked: str) -> None:
        """Set the number of the episode, by its first request."""
        if self._number < 0:
            self._number = self._row.claim_number(kind, asked)

    def _position(self, turn: int, number: int = 0) -> RecordPosition:
        return RecordPosition(self._number, turn, number)

    async def _begin(
        self, what: str, kind: RecordKind, position: RecordPosition, asked: str, on_replay: OnReplay
    ) -> None:
        """Record the start of a call or a reply if repeating the call or reply is not allowed."""
        if on_replay not in (OnReplay.ONCE, OnReplay.RESTART):
            return
        is_once = on_replay is OnReplay.ONCE
        if is_once:
            self._row.only_once = what
            doubt = self._row.record.doubt
            if doubt is not None:
                raise self._row.mismatched(f"{what} may have been used before: {doubt}")
        self._row.keep(kind, position, asked=asked, got={"what": what} if is_once else None)
        await self._row.flushed(to_disk=is_once)

    def _refuse_if_lost(self, what: str, on_replay: OnReplay) -> None:
        if on_replay is OnReplay.RESTART:
            raise self._row.mismatched(f"{what} was used before, and its on_replay does not allow a replay")

    def _refuse_if_state_is_lost(self, what: str, on_replay: OnReplay) -> None:
        """Refuse a new call if the state of any tool was not restored.

        Tools of one trajectory may share state. Only tools without state, or with restored state, may be called then.
        """
        if self._lost is not None and on_replay not in (OnReplay.RECORDED, OnReplay.RERUN):
            raise self._row.mismatched(
                f"{what} is called after {self._lost}, whose state cannot be restored; the tools may share state"
            )

    async def _rebuild(
        self,
        what: str,
        on_replay: OnReplay,
        *,
        is_read_later: bool = True,
        again: Callable[[], Awaitable[object]],
        prepare: Callable[[], Awaitable[object]],
    ) -> None:
        """Restore the state that a tool or interaction had after its recorded response, if the state is read later."""
        if on_replay is OnReplay.RESTART and not is_read_later:
            self._lost = what
            return
        self._refuse_if_lost(what, on_replay)
        try:
            await (again() if on_replay is OnReplay.RERUN else prepare())
        except CallAborted:
            self._row.is_cut = True
        except Exception as error:
            raise self._row.mismatched(f"{what} could not be replayed: {describe_error(error)}") from error


def _kind_of(messages: Sequence[Message]) -> RecordKind:
    """Return whether a tool or the interaction wrote the messages."""
    is_tool_reply = any(message["role"] == "tool" for message in messages)
    return RecordKind.OBSERVATION if is_tool_reply else RecordKind.INTERACTION


def _got(entry: RecordEntry) -> Any:
    assert entry.got is not None  # `recorded` raises for responses that could not be recorded.
    return entry.got


def _interrupted(call: ToolCall) -> ToolResult:
    effect = "it may or may not have taken effect, and was not run again"
    detail = f"the run was interrupted while {call.name} ran; {effect}"
    return ToolResult(
        ToolResponse(text=f"Error: {detail}"), incident=Incident(IncidentKind.INTERRUPTED_CALL, detail)
    )
