"""Replay of a finished trajectory. Loop, template and parser run again, and the responses come from the record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agent_loop.chat.multimodal import Encoded
from agent_loop.recording.record import RecordEntry, RecordKind, RecordPosition
from agent_loop.recording.recorded_responses import RecordedResponses
from agent_loop.recording.row_log import BEGINNINGS, EpisodeLog, LoggedCall, ReplayMismatch, RowLog
from agent_loop.types import Message


class ReplayLog(RowLog):
    """Log that returns recorded completions, tool results and replies in order, without comparing the requests.

    Prompts and observations are encoded again. Nothing is recorded.

    Args:
        trajectory_id: `group=.../rollout=...`.
        recorded: The recorded responses.
        continue_live: Whether requests beyond the record go to the server, the tools and the interaction. Their state
            is then restored according to `on_replay`. Otherwise such requests fail the row.
    """

    def __init__(self, trajectory_id: str, recorded: RecordedResponses, *, continue_live: bool) -> None:
        super().__init__(trajectory_id)
        self.continue_live = continue_live
        self._responses_of: Mapping[RecordKind, Sequence[Any]] = {
            RecordKind.COMPLETION: recorded.completions,
            RecordKind.CALL_ENDED: recorded.calls,
            RecordKind.REPLY: recorded.replies,
        }
        self._turns: defaultdict[RecordKind, list[tuple[int, int]]] = defaultdict(list)

    @property
    def is_kept(self) -> bool:
        return True

    def new_episode(self) -> EpisodeLog:
        return _ReplayEpisodeLog(self)

    def restart(self, *, why: str | None) -> None:
        super().restart(why=why)
        self._turns.clear()

    def keep(self, kind: RecordKind, position: RecordPosition, *, asked: str, got: Any) -> None:
        pass

    def recorded(self, kind: RecordKind, position: RecordPosition, asked: str) -> RecordEntry | None:
        """Return the next recorded response of this kind; None if there is none and the request is made live."""
        if kind not in BEGINNINGS.values():
            return None
        turns, turn = self._turns[kind], (position.episode, position.turn)
        if turn not in turns:
            turns.append(turn)
        number, responses = turns.index(turn), self._responses_of[kind]
        got = responses[number] if number < len(responses) else None
        if kind is RecordKind.CALL_ENDED and got is not None:
            got = got[position.number] if position.number < len(got) else None
        if got is None and not self.continue_live:
            raise self.mismatched(
                f"the loop requests another {kind.replace('_', ' ')}, but only {number} were recorded"
            )
        return None if got is None else RecordEntry(kind, position, asked, got)

    def mismatched(self, why: str) -> ReplayMismatch:
        """Return the error that fails the row. A replayed row is not restarted."""
        return ReplayMismatch(why)


class _ReplayEpisodeLog(EpisodeLog):
    """Log of one episode of a replay."""

    def __init__(self, row: ReplayLog) -> None:
        super().__init__(row)
        self._replay = row

    async def tokens(
        self, messages: Sequence[Message], *, encode: Callable[[], Awaitable[Encoded]]
    ) -> Encoded:
        self._claim_number(RecordKind.PROMPT, "")
        self.next_turn()
        return await encode()

    async def _rebuild(self, call: LoggedCall[Any], result: Any) -> None:
        if self._replay.continue_live:
            await super()._rebuild(call, result)
