"""Log of one rollout of one row. It returns recorded turns first, then records new turns."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Generic, TypeVar, cast

import numpy as np

from agent_loop.chat.multimodal import Encoded
from agent_loop.errors import AgentLoopError
from agent_loop.recording.record import RecordEntry, RecordKind, RecordPosition, RowRecord, Sink
from agent_loop.recording.serialization import serialize_trajectories
from agent_loop.recording.values import Unstorable, digest, pack
from agent_loop.runtime.concurrency import CallAborted
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import ToolResponse
from agent_loop.tools.results import ToolResult
from agent_loop.trajectory import Incident, IncidentKind, Trajectory
from agent_loop.trajectory.codec import decode_completion, encode_completion, from_plain, to_plain
from agent_loop.types import Message, SamplingParams, TokenIds, TokenOutput, ToolCall

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

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


class ReplayMismatch(AgentLoopError):
    """Raised when an episode differs from its record, or when a recorded step cannot be repeated."""


@dataclass(frozen=True, slots=True)
class LoggedCall(Generic[ResultT]):
    """Call of a tool, or request for a reply of the interaction."""

    tool: ToolCall | None
    """The call of a tool; None for the interaction."""
    num_messages: int
    """Number of messages of the conversation, which identifies a request for a reply."""
    result_type: type[ResultT]
    on_replay: OnReplay
    """How the call is replayed."""
    execute: Callable[[], Awaitable[ResultT]]
    """Runs the call."""
    prepare: Callable[[], Awaitable[object]]
    """Creates the instance of the tool or the interaction, without a call."""
    is_read_later: bool = True
    """Whether the instance's state is read after its last call, for a reward."""

    @property
    def what(self) -> str:
        return "the interaction" if self.tool is None else f"tool {self.tool.name!r}"

    @property
    def asked(self) -> str:
        """Digest of the request."""
        tool = self.tool
        return str(self.num_messages) if tool is None else digest([tool.name, tool.arguments])


class RowLog:
    """Log of one row, used by one attempt at a time. Single use.

    Without a sink, the log records nothing and runs every step, until `continue_from` is called.
    """

    def __init__(
        self, trajectory_id: str, *, sink: Sink | None = None, record: RowRecord | None = None
    ) -> None:
        self.mismatch: str | None = None
        """Reason why the record cannot be replayed, so that the row has to start again; else None."""
        self.only_once: str | None = None
        """Tool or interaction that can be used only once and may have been used. The row then cannot start again."""
        self.is_cut = False
        """Whether a cancellation interrupted the restoration of recorded state."""
        self.copies: list[bytes] | None = None
        """All records of the row, once `continue_from` was called."""
        self.volatile: re.Pattern[str] | None = None
        """Matches texts of messages that are left out when a request is compared with the recorded one."""
        self._row = trajectory_id
        self._sink = sink
        self._cancellation: asyncio.Event | None = None
        self.record = record or RowRecord()
        """Records to replay."""
        self._answers: Mapping[RecordPosition, RecordEntry] = {}
        self._replay(self.record)
        self._claimed: set[int] = set()
        """Numbers of the episodes that have begun."""

    @property
    def is_kept(self) -> bool:
        """Whether the log records, so that the row can be resumed from it."""
        return self._sink is not None or self.copies is not None

    def continue_from(self, payloads: Sequence[bytes], *, cancellation: asyncio.Event | None) -> None:
        """Replay the records of a cancelled run of this row, and copy all records to `copies`.

        If the journal holds records of the row, they are replayed instead. They include those of the cancelled run.
        """
        self._cancellation = cancellation
        record = self.record
        if not self._answers:
            record = RowRecord.of(payloads)
            self._replay(record)
            if payloads:  # one record, so that a crash keeps all of them or none
                self._append({"is": RecordKind.RESUMED, "got": list(payloads)})
        self.copies = [pack(entry.as_record()) for entry in record.entries]

    def extended(self, payloads: Iterable[bytes]) -> RowLog:
        """Return the log of the row's next attempt, with the records that another process appended."""
        record = replace(self.record, entries=list(self.record.entries))
        record.extend(payloads)
        return RowLog(self._row, sink=self._sink, record=record)

    def new_episode(self) -> EpisodeLog:
        """Return the log of a new episode of the row."""
        return EpisodeLog(self)

    def restart(self, *, why: str | None) -> None:
        """Discard all records. The next attempt starts from the beginning."""
        self._append({"is": RecordKind.RESTART, "why": why})
        self._answers = {}
        self._claimed.clear()
        self.mismatch = None
        if self.copies is not None:
            self.copies.clear()

    async def end(self, trajectories: Sequence[Trajectory]) -> None:
        """Record the row's result. After this returns, the result survives a crash of the process."""
        if self._sink is None:
            return
        try:
            self._append({"is": RecordKind.END, "got": serialize_trajectories(trajectories)})
        except Unstorable as error:
            logger.warning("%s cannot be recorded as finished: its result contains %s", self._row, error)
        await self.flushed()

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
        if self._sink is not None:
            self._sink.append(payload)

    async def flushed(self, *, to_disk: bool = False) -> None:
        """Wait until all records survive a crash of this process or, with `to_disk`, of this machine."""
        if self._sink is not None:
            await self._sink.flushed(to_disk=to_disk)

    def digest(self, messages: Sequence[Message]) -> str:
        """Return the digest of messages, without their volatile texts."""
        return digest(messages if self.volatile is None else _without(self.volatile, messages))

    @property
    def _is_cancelled(self) -> bool:
        return self.is_cut or (self._cancellation is not None and self._cancellation.is_set())

    def _replay(self, record: RowRecord) -> None:
        self._answers = record.entries_by_position()
        for entry in record.entries:
            if entry.kind in (RecordKind.CALL_BEGAN, RecordKind.REPLY_BEGAN) and entry.got is not None:
                self.only_once = str(entry.got["what"])

    def _append(self, record: Mapping[str, Any]) -> None:
        """Append a record with the name of its row."""
        if not self.is_kept:
            return
        payload = pack({**record, "row": self._row})
        if self.copies is not None:
            self.copies.append(payload)
        if self._sink is not None:
            self._sink.append(payload)


class EpisodeLog:
    """Log of one episode: its steps in order.

    The episode calls a method for each step. The method returns the recorded result if there is one. Otherwise it runs
    the step, records the result and returns it.

    Methods raise `ReplayMismatch` if the step differs from the recorded step, and `CallAborted` if the row was
    cancelled and there is no result.
    """

    def __init__(self, row: RowLog) -> None:
        self._row = row
        self._number = -1
        """Number of the episode, known from its first request on."""
        self._num_turns = 0
        self._num_tokens = 0
        self._lost: str | None = None
        """Tool whose replies were replayed although its state was not restored; None if there is none."""

    @property
    def is_kept(self) -> bool:
        """Whether the log records, so that the episode can be resumed from it."""
        return self._row.is_kept

    def position(self) -> int:
        """Return the current position, for `branch`."""
        return self._num_tokens

    def branch(self, *, at: int) -> EpisodeLog:
        """Return the log of an episode that branches off at a position."""
        episode = self._row.new_episode()
        if self._row.is_kept:
            parent = {"parent": self._number, "num_tokens": at}
            asked = digest(parent)
            episode._claim_number(RecordKind.BRANCH, asked)
            position = episode._position(episode.next_turn())
            if self._row.recorded(RecordKind.BRANCH, position, asked) is None:
                self._row.keep(RecordKind.BRANCH, position, asked=asked, got=parent)
            episode._num_tokens = at
        return episode

    def next_turn(self) -> int:
        """Return the number of the next turn, for the `turn` of `call`."""
        self._num_turns += 1
        return self._num_turns - 1

    async def tokens(
        self, messages: Sequence[Message], *, encode: Callable[[], Awaitable[Encoded]]
    ) -> Encoded:
        """Return the tokens of a prompt or of a reply to the model."""
        if not self._row.is_kept:
            return await encode()
        asked = self._row.digest(messages)
        kind = RecordKind.OBSERVATION if self._num_tokens else RecordKind.PROMPT
        self._claim_number(kind, asked)
        position = self._position(self.next_turn())
        entry = self._row.recorded(kind, position, asked)
        if entry is None:
            encoded = await encode()
            self._row.keep(kind, position, asked=asked, got=to_plain(encoded))
        else:
            encoded = from_plain(entry.got, Encoded)
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
        """Return the completion of a context of `num_context` tokens and a prefix.

        Args:
            params: Sampling parameters of the turn.
            num_context: Number of tokens of the context, without the prefix.
            prefix: Tokens with which the turn begins, and which the model did not sample.
            sample: Samples a completion. Called with the recorded part of an aborted completion, it returns the rest.
        """
        if not self._row.is_kept:
            return await sample(None)
        request = f"{num_context} {params}" + (f" {list(prefix)}" if len(prefix) else "")
        position, asked = self._position(self.next_turn()), digest(request)
        entry = self._row.recorded(RecordKind.COMPLETION, position, asked)
        output = None if entry is None else decode_completion(entry.got)
        if output is None or output.stop_reason == "aborted":
            rest = await sample(output)
            output = rest if output is None else output.then(rest)
            is_cut = output.stop_reason == "aborted"
            kind = RecordKind.COMPLETION_BEGAN if is_cut else RecordKind.COMPLETION
            got = encode_completion(output, logprob_type=np.float32)
            self._row.keep(kind, position, asked=asked, got=got)
            if is_cut:
                return output
        self._num_tokens += len(prefix) + len(output.token_ids)
        return output

    async def call(self, call: LoggedCall[ResultT], *, turn: int | None = None, number: int = 0) -> ResultT:
        """Return the result of a call."""
        row, on_replay = self._row, call.on_replay
        if not row.is_kept:
            if on_replay is OnReplay.ONCE:
                row.only_once = call.what
            return await call.execute()
        is_tool, asked = call.tool is not None, call.asked
        position = self._position(self.next_turn() if turn is None else turn, number)
        ended = RecordKind.CALL_ENDED if is_tool else RecordKind.REPLY
        entry = row.recorded(ended, position, asked)
        if entry is not None and entry.kind is ended:
            result = from_plain(entry.got, call.result_type)
            await self._rebuild(call, result)
            return result
        if is_tool:
            self._refuse_if_state_is_lost(call)
        if entry is None:
            await self._begin(call, position, asked)
            result = await call.execute()
        elif on_replay is OnReplay.ONCE:
            result = cast(ResultT, self._interrupted(call))
        else:
            self._refuse_if_lost(call)
            result = await call.execute()
        row.keep(ended, position, asked=asked, got=to_plain(result))
        return result

    def keep_verdicts(self, verdicts: Mapping[str, float | None]) -> None:
        """Record the rewards, by tool, of a cancelled episode's tools whose state cannot be restored."""
        got = {**self.kept_verdicts(), **verdicts}
        self._row.keep(RecordKind.VERDICTS, self._position(AFTER_ALL_TURNS), asked="", got=got)

    def kept_verdicts(self) -> Mapping[str, float | None]:
        """Return the rewards, by tool, that were recorded when the episode was cancelled."""
        if not self._row.is_kept:
            return {}
        entry = self._row.recorded(RecordKind.VERDICTS, self._position(AFTER_ALL_TURNS), "")
        return {} if entry is None else entry.got

    def _claim_number(self, kind: RecordKind, asked: str) -> None:
        """Set the number of the episode, by its first request."""
        if self._number < 0:
            self._number = self._row.claim_number(kind, asked)

    def _position(self, turn: int, number: int = 0) -> RecordPosition:
        return RecordPosition(self._number, turn, number)

    async def _begin(self, call: LoggedCall[Any], position: RecordPosition, asked: str) -> None:
        """Record the start of a call if repeating the call is not allowed."""
        if call.on_replay not in (OnReplay.ONCE, OnReplay.RESTART):
            return
        is_once = call.on_replay is OnReplay.ONCE
        if is_once:
            self._row.only_once = call.what
        kind = RecordKind.REPLY_BEGAN if call.tool is None else RecordKind.CALL_BEGAN
        self._row.keep(kind, position, asked=asked, got={"what": call.what} if is_once else None)
        await self._row.flushed(to_disk=is_once)

    def _interrupted(self, call: LoggedCall[Any]) -> ToolResult:
        """Return the result of a call that began, and must not be repeated."""
        if call.tool is None:
            raise self._row.mismatched(
                "the interaction was interrupted while it replied, and can be used only once"
            )
        effect = "it may or may not have taken effect, and was not run again"
        detail = f"the run was interrupted while {call.tool.name} ran; {effect}"
        incident = Incident(IncidentKind.INTERRUPTED_CALL, detail)
        return ToolResult(ToolResponse(text=f"Error: {detail}"), incident=incident)

    def _is_state_unread(self, call: LoggedCall[Any]) -> bool:
        """Return whether nothing reads a tool's state after its recorded calls."""
        tool = call.tool
        return tool is not None and (not call.is_read_later or tool.name in self.kept_verdicts())

    def _refuse_if_lost(self, call: LoggedCall[Any]) -> None:
        if call.on_replay is OnReplay.RESTART:
            raise self._row.mismatched(
                f"{call.what} was used before, and its on_replay does not allow a replay"
            )

    def _refuse_if_state_is_lost(self, call: LoggedCall[Any]) -> None:
        """Refuse a new call if the state of any tool was not restored.

        Tools of one trajectory may share state. Only tools without state, or with restored state, may be called then.
        """
        if self._lost is not None and call.on_replay not in (OnReplay.RECORDED, OnReplay.RERUN):
            raise self._row.mismatched(
                f"{call.what} is called after {self._lost}, whose state cannot be restored; the tools may share state"
            )

    async def _rebuild(self, call: LoggedCall[Any], result: Any) -> None:
        """Restore the state that a tool or interaction had after its recorded result, if the state is read later."""
        if isinstance(result, ToolResult) and result.incident is not None and result.incident.kind in NOT_RUN:
            return
        if call.on_replay is OnReplay.RESTART and self._is_state_unread(call):
            self._lost = call.what
            return
        self._refuse_if_lost(call)
        try:
            await (call.execute() if call.on_replay is OnReplay.RERUN else call.prepare())
        except CallAborted:
            self._row.is_cut = True
        except Exception as error:
            raise self._row.mismatched(
                f"{call.what} could not be replayed: {describe_error(error)}"
            ) from error


def _without(volatile: re.Pattern[str], value: Any) -> Any:
    """Return a JSON value whose strings have placeholders for volatile texts."""
    if isinstance(value, str):
        return volatile.sub("*", value)
    if isinstance(value, Mapping):
        return {name: _without(volatile, each) for name, each in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_without(volatile, each) for each in cast("Sequence[Any]", value)]
    return value
