"""The turns of a session as a tree, and the position of a request in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_loop.episode import EpisodeMark
from agent_loop.gateway.branches import Branch
from agent_loop.gateway.message_keys import MessageKey, chained, digest, opening_key
from agent_loop.types import Message, ToolCall


@dataclass(eq=False, slots=True)
class TurnNode:
    """One request and the model's completion. Written only by the session."""

    branch: Branch
    position: TreePosition
    before: EpisodeMark | None = None
    """State of the branch's episode just before sampling; None until the new messages are rendered."""
    after: EpisodeMark | None = None
    """State of the branch's episode just after sampling; None if the completion failed."""
    reply: MessageKey | None = None
    calls: Mapping[str, ToolCall] = field(default_factory=dict[str, ToolCall])
    """Tool calls of the completion, by the ids that the client received."""
    is_open: bool = False
    """Whether the completion was cut, so that its tokens can be continued."""


@dataclass(frozen=True, eq=False, slots=True)
class TreePosition:
    """Position of a request in the conversation tree."""

    parent: TurnNode | None
    """Turn that the request continues; None if the request starts a new conversation."""
    new_messages: Sequence[Message]
    """Messages after the parent's completion; all messages if there is no parent."""
    request_key: str
    """Equal for requests with the same parent and the same new messages."""
    history: str
    """Key of the whole conversation, which ignores differences that clients introduce."""
    exact_history: str
    """Key of the whole conversation exactly as the client wrote it."""
    call_ids: Sequence[str] = ()
    """Ids of the calls in the parent's completion, as the client has them."""
    has_rewritten_calls: bool = False
    """Whether the client changed arguments of calls in the parent's completion."""


class ConversationTree:
    """Finds the longest known conversation that a request continues."""

    def __init__(self) -> None:
        self._by_history: dict[str, list[TurnNode]] = {}
        self._by_call_ids: dict[str, list[TurnNode]] = {}
        self._by_request: dict[str, list[TurnNode]] = {}

    def locate(
        self,
        messages: Sequence[Message],
        keys: Sequence[MessageKey],
        *,
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        trusts_call_ids: bool = False,
    ) -> TreePosition:
        """Return the position of a request.

        A request continues a turn if all of these hold: the request's last assistant message equals the turn's
        completion, the messages before it equal the turn's conversation, tools and variables are the same, and at least
        one message follows.

        Args:
            messages: The whole conversation.
            keys: Key of each message.
            tools: Tools that the model sees.
            variables: Variables of the chat template.
            trusts_call_ids: Whether calls are recognised by their ids even if the client has changed their arguments.
        """
        opening = opening_key(tools, variables)
        history = exact = opening
        parent, start, is_rewritten, call_ids = None, 0, False, tuple[str, ...]()
        for position, message_key in enumerate(keys, start=1):
            key, exact_key = message_key.key, message_key.exact_key
            if message_key.role == "assistant":
                parent = self._turn_with_reply(chained(history, key), message_key, exact=exact)
                is_rewritten = parent is None and trusts_call_ids
                if is_rewritten:
                    parent = self._turn_with_calls(history, message_key)
                start, call_ids = position, message_key.call_ids
                key = exact_key = message_key.exact_key if parent is None else _key_of_reply(parent)
            history, exact = chained(history, key), chained(exact, exact_key)
        if parent is None or start == len(messages):
            parent, start, is_rewritten = None, 0, False
        new = [message_key.exact_key for message_key in keys[start:]]
        origin = opening if parent is None else id(parent)
        request_key = digest(origin, new)
        return TreePosition(parent, messages[start:], request_key, history, exact, call_ids, is_rewritten)

    def find_cut_turn(self, position: TreePosition, reply: MessageKey) -> TurnNode | None:
        """Return the turn with this completion after the conversation of a position, if it can be continued."""
        history = chained(position.history, reply.key)
        return self._turn_with_reply(history, reply, exact=position.exact_history, is_open=True)

    def position_of_rest(self, turn: TurnNode) -> TreePosition:
        """Return the position of requests that continue a cut turn."""
        at = turn.position
        return TreePosition(at.parent, (), digest("rest", id(turn)), at.history, at.exact_history)

    def turns_at(self, position: TreePosition) -> Sequence[TurnNode]:
        """Return the turns of requests with the same parent and the same new messages."""
        return self._by_request.get(position.request_key, ())

    def add(self, turn: TurnNode) -> None:
        """Add a turn that starts."""
        self._by_request.setdefault(turn.position.request_key, []).append(turn)

    def complete(self, turn: TurnNode, reply: MessageKey) -> None:
        """Store the completion of a turn, so that later requests can continue it."""
        turn.reply = reply
        self._by_history.setdefault(chained(turn.position.history, reply.key), []).append(turn)
        if reply.key_by_ids:
            by_ids = chained(turn.position.history, reply.key_by_ids)
            self._by_call_ids.setdefault(by_ids, []).append(turn)

    def _turn_with_calls(self, history: str, message_key: MessageKey) -> TurnNode | None:
        """Return the latest turn after this history whose calls have the names and ids of the message's calls."""
        turns = (
            self._by_call_ids.get(chained(history, message_key.key_by_ids), ())
            if message_key.key_by_ids
            else ()
        )
        for turn in reversed(turns):
            if turn.reply is not None and message_key.reasoning in ("", turn.reply.reasoning):
                return turn
        return None

    def _turn_with_reply(
        self, history: str, message_key: MessageKey, *, exact: str, is_open: bool = False
    ) -> TurnNode | None:
        """Return the turn whose conversation has this history, and which can be continued with `is_open`.

        Among several, prefer the same call ids, then the same exact history, then the latest turn.
        """
        found: TurnNode | None = None
        best_match = (False, False)
        for turn in self._by_history.get(history, ()):
            assert turn.reply is not None
            if message_key.reasoning in ("", turn.reply.reasoning) and (turn.is_open or not is_open):
                match = (turn.reply.call_ids == message_key.call_ids, turn.position.exact_history == exact)
                if found is None or match >= best_match:
                    found, best_match = turn, match
        return found


def _key_of_reply(turn: TurnNode) -> str:
    assert turn.reply is not None, "turns are found by their replies"
    return turn.reply.key
