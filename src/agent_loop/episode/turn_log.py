"""Episode log: interface through which an episode records its turns and replays recorded turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from agent_loop.chat.multimodal import Encoded
from agent_loop.errors import AgentLoopError
from agent_loop.interactions.session import InteractionReply
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.results import ToolResult
from agent_loop.trajectory import Segment
from agent_loop.types import Message, SamplingParams, TokenIds, TokenOutput, ToolCall


class ReplayMismatch(AgentLoopError):
    """Raised when an episode differs from its record, or when a recorded step cannot be repeated."""


class TurnLog(Protocol):
    """Log of one episode: its steps in order.

    The episode calls a method before each step. The method returns the recorded result if the log has one. Otherwise
    the method runs the step, records the result and returns it.

    Methods raise `ReplayMismatch` if the step differs from the recorded step. They may raise `CallAborted` if the
    episode was cancelled and the log has no result.
    """

    def position(self) -> Any:
        """Return the current position in the log, for `branch`."""
        ...

    def branch(self, *, at: Any) -> TurnLog:
        """Return the log of an episode that branches off at a position."""
        ...

    def next_turn(self) -> int:
        """Return the number of the next turn, for the `turn` of `tool_result`."""
        ...

    def tokens(
        self, messages: Sequence[Message], *, encode: Callable[[], Awaitable[Encoded]]
    ) -> Awaitable[Encoded]:
        """Return the tokens of a prompt or an observation."""
        ...

    def completion(
        self,
        params: SamplingParams,
        *,
        num_context: int,
        prefix: TokenIds,
        sample: Callable[[TokenOutput | None], Awaitable[TokenOutput]],
    ) -> Awaitable[TokenOutput]:
        """Return the completion of a context of `num_context` tokens and a prefix.

        Args:
            params: Sampling parameters of the turn.
            num_context: Number of tokens of the context, without the prefix.
            prefix: Tokens with which the turn begins, and which the model did not sample.
            sample: Samples a completion. Called with the recorded part of an aborted completion, it returns the rest.
        """
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
        """Return the result of a tool call.

        Args:
            call: Name and arguments.
            turn: Number of the turn, from `next_turn`.
            number: Index of the call in its turn.
            on_replay: How the call is replayed.
            is_read_later: Whether the tool's state is read after its last call, for a reward.
            execute: Runs the call.
            prepare: Creates the tool's instance without a call.
        """
        ...

    @property
    def is_kept(self) -> bool:
        """Whether the log is stored, so that the episode can be resumed from it."""
        ...

    def keep_verdicts(self, verdicts: Mapping[str, float | None]) -> None:
        """Record the rewards, by tool, of a cancelled episode's tools whose state cannot be restored."""
        ...

    def kept_verdicts(self) -> Mapping[str, float | None]:
        """Return the rewards, by tool, that were recorded when the episode was cancelled."""
        ...

    def interaction_reply(
        self,
        *,
        num_messages: int,
        on_replay: OnReplay,
        respond: Callable[[], Awaitable[InteractionReply]],
        prepare: Callable[[], Awaitable[object]],
    ) -> Awaitable[InteractionReply]:
        """Return the interaction's reply to a conversation of `num_messages` messages.

        Args:
            num_messages: Number of messages of the conversation.
            on_replay: How the reply is replayed.
            respond: Calls the interaction.
            prepare: Creates the interaction's instance without a reply.
        """
        ...

    def link_segments(self, segments: Sequence[Segment]) -> None:
        """Note that the log contains the tokens of `segments`, so that the record of the output need not repeat
        them."""
        ...


class NoTurnLog:
    """Log that records nothing and runs every step. The episodes of a trajectory may share one."""

    is_kept = False

    def __init__(self) -> None:
        self.only_once: str | None = None
        """Tool or interaction that was used and can be used only once. None if there is none."""

    def keep_verdicts(self, verdicts: Mapping[str, float | None]) -> None:
        pass

    def kept_verdicts(self) -> Mapping[str, float | None]:
        return {}

    def position(self) -> None:
        pass

    def branch(self, *, at: Any) -> NoTurnLog:
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
        prefix: TokenIds,
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
        if on_replay is OnReplay.ONCE:
            self.only_once = f"tool {call.name!r}"
        return execute()

    def interaction_reply(
        self,
        *,
        num_messages: int,
        on_replay: OnReplay,
        respond: Callable[[], Awaitable[InteractionReply]],
        prepare: Callable[[], Awaitable[object]],
    ) -> Awaitable[InteractionReply]:
        if on_replay is OnReplay.ONCE:
            self.only_once = "the interaction"
        return respond()

    def link_segments(self, segments: Sequence[Segment]) -> None:
        pass
