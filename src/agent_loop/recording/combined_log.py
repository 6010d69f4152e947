"""Log of an episode that reads two records."""

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
from agent_loop.types import Message, SamplingParams, TokenOutput, ToolCall


class CombinedLog:
    """Log that reads one record first and falls back to another. Implements `TurnLog`."""

    def __init__(self, upper: TurnLog, lower: TurnLog) -> None:
        self._upper = upper
        self._lower = lower
        self._lower_turns: dict[int, int] = {}

    def position(self) -> tuple[Any, Any]:
        return self._upper.position(), self._lower.position()

    def branch(self, *, at: Any) -> TurnLog:
        upper, lower = at
        return CombinedLog(self._upper.branch(at=upper), self._lower.branch(at=lower))

    def next_turn(self) -> int:
        turn = self._upper.next_turn()
        self._lower_turns[turn] = self._lower.next_turn()
        return turn

    async def tokens(
        self, messages: Sequence[Message], *, encode: Callable[[], Awaitable[Encoded]]
    ) -> Encoded:
        return await self._upper.tokens(messages, encode=partial(self._lower.tokens, messages, encode=encode))

    async def completion(
        self,
        params: SamplingParams,
        *,
        num_context: int,
        sample: Callable[[TokenOutput | None], Awaitable[TokenOutput]],
    ) -> TokenOutput:
        async def rest_of(begun: TokenOutput | None) -> TokenOutput:
            async def rest_of_both(more: TokenOutput | None) -> TokenOutput:
                return await sample(begun.then(more) if begun and more else begun or more)

            return await self._lower.completion(params, num_context=num_context, sample=rest_of_both)

        return await self._upper.completion(params, num_context=num_context, sample=rest_of)

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
        lower = partial(
            self._lower.tool_result,
            call,
            turn=self._lower_turns[turn],
            number=number,
            on_replay=on_replay,
            is_read_later=is_read_later,
            execute=execute,
            prepare=prepare,
        )
        return await self._upper.tool_result(
            call,
            turn=turn,
            number=number,
            on_replay=on_replay,
            is_read_later=is_read_later,
            execute=lower,
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
        lower = partial(
            self._lower.interaction_reply,
            num_messages=num_messages,
            on_replay=on_replay,
            respond=respond,
            prepare=prepare,
        )
        return await self._upper.interaction_reply(
            num_messages=num_messages, on_replay=on_replay, respond=lower, prepare=prepare
        )

    @property
    def is_kept(self) -> bool:
        return self._upper.is_kept or self._lower.is_kept

    def keep_verdicts(self, verdicts: Mapping[str, float | None]) -> None:
        self._upper.keep_verdicts(verdicts)
        self._lower.keep_verdicts(verdicts)

    def kept_verdicts(self) -> Mapping[str, float | None]:
        return {**self._lower.kept_verdicts(), **self._upper.kept_verdicts()}

    def holds(self, segments: Sequence[Segment]) -> None:
        self._upper.holds(segments)
        self._lower.holds(segments)
