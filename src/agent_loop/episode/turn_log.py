"""Where an episode's turns are kept as they happen, so that the same episode can be run again and be told the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from agent_loop.chat.multimodal import Encoded
from agent_loop.errors import AgentLoopError
from agent_loop.interactions.session import InteractionReply
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.results import ToolResult
from agent_loop.trajectory import Segment
from agent_loop.types import Message, SamplingParams, TokenOutput, ToolCall


class ReplayMismatch(AgentLoopError):
    """The episode asks something else than it did the first time, or what it asks for cannot be given again."""


class TurnLog(Protocol):
    """The record of one episode, in the order of its verbs.

    Each method is asked what the episode is about to do, and either returns what is on record or does it, keeps what
    came of it and returns that. Asked for anything else than the record has at this place, it raises `ReplayMismatch`;
    where the episode was cancelled and nothing is on record, it may raise `CallAborted`.
    """

    def position(self) -> Any:
        """How far the episode has come, for `branch`."""
        ...

    def branch(self, *, at: Any) -> TurnLog:
        """The record of an episode that goes on in another way from where this one was at a position."""
        ...

    def next_turn(self) -> int:
        """Takes the number of a turn whose calls are then logged one by one."""
        ...

    def tokens(
        self, messages: Sequence[Message], *, encode: Callable[[], Awaitable[Encoded]]
    ) -> Awaitable[Encoded]:
        """The tokens of a prompt or an observation."""
        ...

    def completion(
        self,
        params: SamplingParams,
        *,
        num_context: int,
        sample: Callable[[TokenOutput | None], Awaitable[TokenOutput]],
    ) -> Awaitable[TokenOutput]:
        """What the model says to `num_context` tokens. `sample` is given what there is of a completion that was cut
        before, and returns the rest."""
        ...

    def tool_result(
        self,
        call: ToolCall,
        *,
        turn: int,
        number: int,
        on_replay: OnReplay,
        is_read_later: bool,
        execute: Callable[[], Awaitable[ToolResult]],
        prepare: Callable[[], Awaitable[object]],
    ) -> Awaitable[ToolResult]:
        """What a call gives: the `number`-th of a turn. `prepare` sets the tool's instance up without a call.

        `is_read_later` says that the trajectory reads the tool's state after its last call, for a verdict.
        """
        ...

    @property
    def is_kept(self) -> bool:
        """Whether the episode can be run again from this log."""
        ...

    def keep_verdicts(self, verdicts: Mapping[str, float | None]) -> None:
        """Keep the verdicts, by tool, of an episode that is cut: those of tools whose state cannot be brought back."""
        ...

    def kept_verdicts(self) -> Mapping[str, float | None]:
        """Return the verdicts that were kept when the episode was cut, for tools that are not called again."""
        ...

    def interaction_reply(
        self,
        *,
        num_messages: int,
        on_replay: OnReplay,
        respond: Callable[[], Awaitable[InteractionReply]],
        prepare: Callable[[], Awaitable[object]],
    ) -> Awaitable[InteractionReply]:
        """What the interaction says to a conversation of `num_messages`."""
        ...

    def holds(self, segments: Sequence[Segment]) -> None:
        """Takes note that these segments are the tokens on record up to here."""
        ...


class Unlogged:
    """Keeps nothing: every turn is live."""

    is_kept = False

    def keep_verdicts(self, verdicts: Mapping[str, float | None]) -> None:
        pass

    def kept_verdicts(self) -> Mapping[str, float | None]:
        return {}

    def position(self) -> None:
        pass

    def branch(self, *, at: Any) -> Unlogged:
        return self

    def next_turn(self) -> int:
        return 0

    def tokens(
        self, messages: Sequence[Message], *, encode: Callable[[], Awaitable[Encoded]]
    ) -> Awaitable[Encoded]:
        return encode()

    def completion(
        self,
        params: SamplingParams,
        *,
        num_context: int,
        sample: Callable[[TokenOutput | None], Awaitable[TokenOutput]],
    ) -> Awaitable[TokenOutput]:
        return sample(None)

    def tool_result(
        self,
        call: ToolCall,
        *,
        turn: int,
        number: int,
        on_replay: OnReplay,
        is_read_later: bool,
        execute: Callable[[], Awaitable[ToolResult]],
        prepare: Callable[[], Awaitable[object]],
    ) -> Awaitable[ToolResult]:
        return execute()

    def interaction_reply(
        self,
        *,
        num_messages: int,
        on_replay: OnReplay,
        respond: Callable[[], Awaitable[InteractionReply]],
        prepare: Callable[[], Awaitable[object]],
    ) -> Awaitable[InteractionReply]:
        return respond()

    def holds(self, segments: Sequence[Segment]) -> None:
        pass
