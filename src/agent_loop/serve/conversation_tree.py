"""The turns of a session as a tree, and the position of a request in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, cast

from agent_loop.episode import Episode, EpisodeMark
from agent_loop.serve.fields import without_none
from agent_loop.trajectory import Incident
from agent_loop.types import Message, StopReason, ToolCall


class Branch:
    """One episode of a session."""

    def __init__(self, episode: Episode, *, number: int) -> None:
        self.episode = episode
        self.number = number
        self.is_busy = True
        """Whether a request is using the episode. Another request for the same position gets its own branch."""
        self.is_open = False
        self.has_sampled_tokens = False
        """Whether the episode holds tokens that the model sampled."""
        self.noted: list[Incident] = []
        """Recorded incidents of the requests of this branch, such as parameters that were dropped."""

    def note_once(self, incidents: Sequence[Incident]) -> None:
        """Record incidents, except those that the branch has recorded already."""
        for incident in incidents:
            if incident not in self.noted:
                self.noted.append(incident)
                self.episode.note(incident.kind, incident.detail)

    def is_free_at(self, mark: EpisodeMark | None) -> bool:
        """Return whether the next request may continue the episode from this mark."""
        return (
            mark is not None
            and not self.is_busy
            and self.episode.stop_reason is not StopReason.CANCELLED
            and self.episode.mark() == mark
        )


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
        """Completed turns by the key of the conversation with the completion, and by the ids of its calls instead."""
        self._by_request: dict[str, list[TurnNode]] = {}
        self._model_ids: dict[str, str] = {}
        """Ids of sampled calls, by the ids that a client writes for them if it allows letters, digits, - and _ only."""

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
                is_rewritten = parent is None and trusts_call_ids and bool(message_key.key_by_ids)
                if is_rewritten:
                    by_ids = chained(history, message_key.key_by_ids)
                    parent = self._turn_with_reply(by_ids, message_key, exact=exact)
                start, call_ids = position, message_key.call_ids
                reply = None if parent is None else parent.reply
                key = exact_key = message_key.exact_key if reply is None else reply.key
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
            self._by_history.setdefault(by_ids, []).append(turn)
        self._model_ids |= {_OTHER.sub("_", call.id): call.id for call in turn.calls.values() if call.id}

    def with_model_ids(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the model's own ids of calls that a client changed.

        Some chat templates write these ids, so that a conversation that is rendered from its messages needs them.
        """
        return [self._with_model_ids(message) for message in messages]

    def _with_model_ids(self, message: Message) -> Message:
        known = self._model_ids
        if message.get("tool_call_id") in known:
            return message | {"tool_call_id": known[str(message["tool_call_id"])]}
        if calls := message.get("tool_calls"):
            return message | {
                "tool_calls": [call | {"id": known.get(call.get("id"), call.get("id"))} for call in calls]
            }
        return message

    def _turn_with_reply(
        self, history: str, message_key: MessageKey, *, exact: str, is_open: bool = False
    ) -> TurnNode | None:
        """Return the turn whose conversation has this history, and which can be continued with `is_open`.

        Among several, prefer the same call ids, then the same exact history, then the latest turn.
        """
        found: TurnNode | None = None
        best_match = (False, False)
        for turn in self._by_history.get(history, ()):
            reply = turn.reply
            if (
                reply is not None
                and message_key.reasoning in ("", reply.reasoning)
                and turn.is_open >= is_open
            ):
                match = (reply.call_ids == message_key.call_ids, turn.position.exact_history == exact)
                if found is None or match >= best_match:
                    found, best_match = turn, match
        return found


_OTHER = re.compile(r"[^A-Za-z0-9_-]")
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
EXACT_FLOAT = 2**53
"""Largest whole number up to which floats are exact, so that 2 and 2.0 are equal for every client."""


@dataclass(frozen=True, slots=True)
class MessageKey:
    """Keys by which one message is compared."""

    role: str
    key: str
    """Digest of the normalised message. For an assistant, without reasoning, which clients drop."""
    exact_key: str
    """Digest of the message as the client wrote it, with reasoning and names."""
    reasoning: str = ""
    call_ids: tuple[str, ...] = ()
    """The client's ids of an assistant's tool calls."""
    key_by_ids: str = ""
    """Digest of an assistant's message with the ids of its calls instead of their arguments; "" without ids."""


def opening_key(tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Return a digest of what a conversation begins with: its tools, and the variables of the chat template.

    The order of the tools counts, the order of a schema's keys does not.
    """
    written = [{**tool, "function": without_none(tool.get("function") or {})} for tool in tools]
    return digest("tools", written, variables) if variables else digest("tools", written)


def message_keys(messages: Sequence[Message]) -> list[MessageKey]:
    keys: list[MessageKey] = []
    positions: dict[str, int] = {}
    for message in messages:
        if message["role"] == "assistant":
            key = _assistant_key(message)
            positions = {call_id: position for position, call_id in enumerate(key.call_ids) if call_id}
        else:
            key = _other_key(message, positions)
        keys.append(key)
    return keys


def digest(*values: Any) -> str:
    """Return the digest of JSON values."""
    return _hash(_ENCODER.encode([_plain(value) for value in values]))


def chained(history: str, key: str) -> str:
    """Return the digest of a history with one more message, from the digests of both."""
    return _hash(history + key)


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=20).hexdigest()


def _assistant_key(message: Message) -> MessageKey:
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    functions = [[call["function"]["name"], call["function"]["arguments"]] for call in calls]
    call_ids = tuple(str(call.get("id") or "") for call in calls)
    content = message.get("content") or ""
    text = content.strip() if isinstance(content, str) else content
    key = digest("assistant", text, functions)
    reasoning = str(message.get("reasoning_content") or "").strip()
    is_bare = not reasoning and message.get("name") is None
    return MessageKey(
        role="assistant",
        key=key,
        exact_key=key if is_bare else digest(key, reasoning, message.get("name")),
        reasoning=reasoning,
        call_ids=call_ids,
        key_by_ids=digest("ids", text, [name for name, _ in functions], call_ids) if all(call_ids) else "",
    )


def _other_key(message: Message, positions: Mapping[str, int]) -> MessageKey:
    """Return the key of a message that is not an assistant's.

    A tool message is identified by the position of its call, because clients change call ids.
    """
    role, content = str(message["role"]), message.get("content") or ""
    text = content.rstrip() if isinstance(content, str) else content
    answered: Any = None
    name = message.get("name")
    if role == "tool":
        call_id = message.get("tool_call_id")
        answered = positions.get(str(call_id), call_id)
        name = None if isinstance(answered, int) else name
    key = digest(role, name, answered, text)
    return MessageKey(role=role, key=key, exact_key=key if text == content else digest(key, content))


def _plain(value: Any) -> Any:
    """Return a JSON value in which whole numbers are integers."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in cast(Sequence[Any], value)]
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT_FLOAT:
        return int(value)
    return value
