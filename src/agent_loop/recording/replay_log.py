"""Runs a finished trajectory again: the loop, the template and the parser are real, what they are answered is not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agent_loop.chat.multimodal import Encoded
from agent_loop.episode.turn_log import ReplayMismatch
from agent_loop.recording.record import RecordEntry, RecordKind, RecordPosition
from agent_loop.recording.recorded_responses import RecordedResponses
from agent_loop.recording.row_log import BEGINNINGS, EpisodeLog, RowLog
from agent_loop.recording.sink import Memory
from agent_loop.runtime.instances import OnReplay
from agent_loop.types import Message


class ReplayLog(RowLog):
    """Answers completions, calls and replies in the order in which they were given the first time, whatever is asked;
    prompts and observations are encoded anew.

    Args:
        trajectory_id: `group=.../rollout=...`.
        spoken: The answers.
        goes_on: What is asked beyond them is really asked: of the server, the tools, the interaction. Instances are
            brought to where they were, as they say in `on_replay`. Otherwise it is refused, and no tool is touched.
    """

    def __init__(self, trajectory_id: str, spoken: RecordedResponses, *, goes_on: bool) -> None:
        super().__init__(trajectory_id, sink=Memory())
        self.goes_on = goes_on
        self.refused: str | None = None
        """What was asked beyond the answers there are."""
        self._answers_of: Mapping[RecordKind, Sequence[Any]] = {
            RecordKind.COMPLETION: spoken.completions,
            RecordKind.CALL_ENDED: spoken.calls,
            RecordKind.REPLY: spoken.replies,
        }
        self._turns: defaultdict[RecordKind, list[tuple[int, int]]] = defaultdict(list)

    def new_episode(self) -> EpisodeLog:
        self._num_lanes += 1
        return _ReplayEpisodeLog(self, self._num_lanes - 1)

    def recorded(self, kind: RecordKind, place: RecordPosition, asked: str) -> RecordEntry | None:
        """The next answer of this kind.

        Raises:
            ReplayMismatch: There are no more, and it does not go on.
        """
        if kind not in BEGINNINGS.values():
            return None
        turns, turn = self._turns[kind], (place.lane, place.turn)
        if turn not in turns:
            turns.append(turn)
        number, answers = turns.index(turn), self._answers_of[kind]
        got = answers[number] if number < len(answers) else None
        if kind is RecordKind.CALL_ENDED and got is not None:
            got = got[place.number] if place.number < len(got) else None
        if got is None and not self.goes_on:
            raise self.mismatched(
                f"the loop asks for another {kind.replace('_', ' ')} than the {number} that were recorded"
            )
        return None if got is None else RecordEntry(kind, place, asked, got)

    def mismatched(self, why: str) -> ReplayMismatch:
        """The row is not begun anew: it fails, and says why."""
        self.refused = self.refused or why
        return ReplayMismatch(why)


class _ReplayEpisodeLog(EpisodeLog):
    """The log of one episode of a rehearsal."""

    def __init__(self, row: ReplayLog, number: int) -> None:
        super().__init__(row, number)
        self._replay = row

    async def tokens(
        self, messages: Sequence[Message], *, encode: Callable[[], Awaitable[Encoded]]
    ) -> Encoded:
        self.next_turn()
        return await encode()

    def kept_verdicts(self) -> Mapping[str, float | None]:
        return {}

    async def _rebuild(
        self,
        what: str,
        on_replay: OnReplay,
        *,
        is_read_later: bool = True,
        again: Callable[[], Awaitable[object]],
        prepare: Callable[[], Awaitable[object]],
    ) -> None:
        if self._replay.goes_on:
            await super()._rebuild(what, on_replay, is_read_later=is_read_later, again=again, prepare=prepare)
