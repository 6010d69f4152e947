"""The turns of a session as a tree, and where in it a request belongs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_loop.episode import EpisodeMark
from agent_loop.gateway.branches import Branch
from agent_loop.gateway.message_keys import MessageKey, chained, digest, tools_key
from agent_loop.types import Message, ToolCall


@dataclass(eq=False, slots=True)
class TurnNode:
    """One request and what the model said to it. Written by the session alone."""

    lane: Branch
    place: TreePosition
    before: EpisodeMark | None = None
    """Where its lane stood when the model began to speak; None as long as it does not stand there."""
    after: EpisodeMark | None = None
    """And where it stood then; None if it did not end in good order."""
    said: MessageKey | None = None
    calls: Mapping[str, ToolCall] = field(default_factory=dict[str, ToolCall])
    """The calls by the ids that the client was told."""


@dataclass(frozen=True, eq=False, slots=True)
class TreePosition:
    """Where a request belongs."""

    parent: TurnNode | None
    """The turn that it goes on from; None where the conversation is not one that was seen."""
    added: Sequence[Message]
    """The messages behind that turn, or all of them."""
    asked: str
    """The same for requests that ask the same."""
    history: str
    """The whole conversation up to where the model is to speak."""
    exact_history: str
    """The same, to the letter."""


class ConversationTree:
    """Finds for each request the longest conversation that it goes on from."""

    def __init__(self) -> None:
        self._said: dict[str, list[TurnNode]] = {}
        self._asked: dict[str, list[TurnNode]] = {}

    def locate(
        self, messages: Sequence[Message], forms: Sequence[MessageKey], *, tools: Sequence[Mapping[str, Any]]
    ) -> TreePosition:
        """Where a request belongs.

        It goes on from a turn if its last assistant message is what was said there, everything before is what had been
        said and asked before, the tools are the same, and something follows.

        Args:
            messages: The whole conversation.
            forms: Its messages, as they are compared.
            tools: The tools that the model is told of.
        """
        history = exact = tools_key(tools)
        parent, start = None, 0
        for position, link in enumerate(forms, start=1):
            key, exact_key = link.key, link.exact_key
            if link.role == "assistant":
                parent, start = self._turn_that_said(chained(history, key), link, exact=exact), position
                key = exact_key = link.exact_key if parent is None else link.key
            history, exact = chained(history, key), chained(exact, exact_key)
        if parent is None or start == len(messages):
            parent, start = None, 0
        new = [link.exact_key for link in forms[start:]]
        origin = tools_key(tools) if parent is None else id(parent)
        return TreePosition(parent, messages[start:], digest(origin, new), history, exact)

    def turns_at(self, place: TreePosition) -> Sequence[TurnNode]:
        """The turns of requests that asked the same."""
        return self._asked.get(place.asked, ())

    def add(self, turn: TurnNode) -> None:
        """Takes a turn that begins."""
        self._asked.setdefault(turn.place.asked, []).append(turn)

    def complete(self, turn: TurnNode, said: MessageKey) -> None:
        """Takes what was said in a turn."""
        turn.said = said
        self._said.setdefault(chained(turn.place.history, said.key), []).append(turn)

    def _turn_that_said(self, history: str, link: MessageKey, *, exact: str) -> TurnNode | None:
        """Of turns that said the same after the same, the one that is most alike, to the letter; of those the last."""
        found: TurnNode | None = None
        most_alike = (False, False)
        for turn in self._said.get(history, ()):
            assert turn.said is not None
            if link.reasoning in ("", turn.said.reasoning):
                alike = (turn.said.call_ids == link.call_ids, turn.place.exact_history == exact)
                if found is None or alike >= most_alike:
                    found, most_alike = turn, alike
        return found
