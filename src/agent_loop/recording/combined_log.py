"""Log of an episode that replays two records, one before the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agent_loop.chat.multimodal import Encoded
from agent_loop.episode.turn_log import TurnLog
from agent_loop.interactions.session import InteractionReply
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.results import ToolResult
from agent_loop.trajectory import Segment
from agent_loop.types import Message, SamplingParams, TokenIds, TokenOutput, ToolCall


class CombinedLog:
    """Log that reads a first record, and a second record for turns the first does not contain. Implements `TurnLog`.

    Args:
        first: The log that is read first.
        second: The log that is read for turns that `first` does not contain.
    """

    def __init__(self, first: TurnLog, second: TurnLog) -> None:
        self._first = first
        self._second = second
        self._second_turns: dict[int, int] = {}

    def position(self) -> tuple[Any, Any]:
        return self._first.position(), self._second.position()

    def branch(self, *, at: Any) -> TurnLog:
        first, second = at
        return CombinedLog(self._first.branch(at=first), self._second.branch(at=second))

    def next_turn(self) -> int:
        turn = self._first.next_turn()
        self._second_turns[turn] = self._second.next_turn()
        return turn

    async def tokens(
        self, messages: Sequence[Message], *, encode: Callable[[], Awaitable[Encoded]]
    ) -> Encoded:
        return await self._first.tokens(
            messages, encode=partial(self._second.tokens, messages, encode=encode)
        )

    async def completion(
        self,
        params: SamplingParams,
        *,
        num_context: int,
        prefix: TokenIds,
        sample: Callable[[TokenOutput | None], Awaitable[TokenOutput]],
    ) -> TokenOutput:
        async def resume_first(head: TokenOutput | None) -> TokenOutput:
            async def resume_second(more: TokenOutput | None) -> TokenOutput:
                return await sample(head.then(more) if head and more else head or more)

            return await self._second.completion(
                params, num_context=num_context, prefix=prefix, sample=resume_second
            )

        return await self._first.completion(
            params, num_context=num_context, prefix=prefix, sample=resume_first
        )

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
        from_second = partial(
            self._second.tool_result,
            call,
            turn=self._second_turns[turn],
            number=number,
            on_replay=on_replay,
            is_read_later=is_read_later,
            execute=execute,
            prepare=prepare,
        )
        return await self._first.tool_result(
            call,
            turn=turn,
            number=number,
            on_replay=on_replay,
            is_read_later=is_read_later,
            execute=from_second,
            prepare=prepare,
        )

    async def interaction_reply(
        self,
        *,
        num_messages: int,
        on_replay: OnReplay,
        respond: Callable[[], Awaitable[InteractionReply]],
        prepare: Callable[[], Awaitable[object]],
    ) -> InteractionReply:
        from_second = partial(
            self._second.interaction_reply,
            num_messages=num_messages,
            on_replay=on_replay,
            respond=respond,
            prepare=prepare,
        )
        return await self._first.interaction_reply(
            num_messages=num_messages, on_replay=on_replay, respond=from_second, prepare=prepare
        )

    @property
    def is_kept(self) -> bool:
        return self._first.is_kept or self._second.is_kept

    def keep_verdicts(self, verdicts: Mapping[str, float | None]) -> None:
        self._first.keep_verdicts(verdicts)
        self._second.keep_verdicts(verdicts)

    def kept_verdicts(self) -> Mapping[str, float | None]:
        return {**self._second.kept_verdicts(), **self._first.kept_verdicts()}

    def link_segments(self, segments: Sequence[Segment]) -> None:
        self._first.link_segments(segments)
        self._second.link_segments(segments)
