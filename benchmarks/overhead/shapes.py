"""What the trajectories of a scenario are like, and how they are kept in a folder. Needs the standard library alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TAIL_TOKENS = 40
"""By so many last tokens of a context, the faked model knows what it is asked."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One scenario. Lengths are in tokens."""

    name: str
    prompt_tokens: int
    """Tool schemas included."""
    num_turns: int
    """Of the assistant; all but the last call a tool."""
    turn_tokens: int
    reply_tokens: int
    """What the template writes around a tool's reply included."""
    prompt_width: int
    response_width: int
    """The batch is padded to these."""
    num_conversations: int = 64
    """More than prompts are kept encoded (eight), so that no round profits from the one before."""

    @property
    def has_tools(self) -> bool:
        return self.num_turns > 1


SHAPES = (
    Shape("short", 472, 3, 100, 78, 512, 512),
    Shape("long", 2272, 10, 500, 78, 2304, 6144, num_conversations=16),
    Shape("single-turn", 472, 1, 100, 0, 512, 512),
    Shape("wide", 472, 3, 100, 78, 2048, 16384, num_conversations=32),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model says to a context."""

    tail: tuple[int, ...]
    """The last tokens of that context."""
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One trajectory."""

    messages: list[dict[str, Any]]
    """The prompt."""
    turns: Sequence[Turn]
    replies: Mapping[str, str]
    """What the tool answers, by what is asked."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The conversations of one scenario."""

    shape: Shape
    conversations: Sequence[Conversation]
    tool_schemas: Sequence[dict[str, Any]]

    @property
    def answers(self) -> dict[tuple[int, ...], Turn]:
        """What the model says, by the tail of what it is given."""
        return {turn.tail: turn for conversation in self.conversations for turn in conversation.turns}

    @property
    def replies(self) -> dict[str, str]:
        """What the tool answers, by what is asked."""
        return {query: text for c in self.conversations for query, text in c.replies.items()}

    def write(self, folder: Path) -> None:
        (folder / f"{self.shape.name}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path, name: str) -> Workload:
        held = json.loads((folder / f"{name}.json").read_text())
        conversations = [
            Conversation(
                messages=conversation["messages"],
                turns=[Turn(tuple(t["tail"]), t["token_ids"], t["logprobs"]) for t in conversation["turns"]],
                replies=conversation["replies"],
            )
            for conversation in held["conversations"]
        ]
        return cls(Shape(**held["shape"]), conversations, held["tool_schemas"])
