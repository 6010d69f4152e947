"""Shapes of the scenarios' trajectories, and their files. Needs only the standard library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TAIL_TOKENS = 40
"""Number of last tokens of a context by which the stub model looks up its completion."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Scenario with its lengths in tokens."""

    name: str
    prompt_tokens: int
    """Length of the prompt, including tool schemas."""
    num_turns: int
    """Number of assistant turns. All but the last one call a tool."""
    turn_tokens: int
    reply_tokens: int
    """Length of a tool result, including the template's text around it."""
    prompt_width: int
    """Width to which the batch pads prompts."""
    response_width: int
    """Width to which the batch pads responses."""
    num_conversations: int = 64
    """Number of conversations. The cache of encoded prompts is smaller (eight), so that no round profits from it."""

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
    """Completion of the stub model for a context."""

    tail: tuple[int, ...]
    """Last tokens of the context."""
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Content of a trajectory."""

    messages: list[dict[str, Any]]
    """Prompt."""
    turns: Sequence[Turn]
    replies: Mapping[str, str]
    """Tool results by query."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations of a scenario."""

    shape: Shape
    conversations: Sequence[Conversation]
    tool_schemas: Sequence[dict[str, Any]]

    @property
    def answers(self) -> dict[tuple[int, ...], Turn]:
        """Turns of the model by the tail of their context."""
        return {turn.tail: turn for conversation in self.conversations for turn in conversation.turns}

    @property
    def replies(self) -> dict[str, str]:
        """Tool results by query."""
        return {query: text for c in self.conversations for query, text in c.replies.items()}

    def write(self, folder: Path) -> None:
        (folder / f"{self.shape.name}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path, name: str) -> Workload:
        stored = json.loads((folder / f"{name}.json").read_text())
        conversations = [
            Conversation(
                messages=conversation["messages"],
                turns=[Turn(tuple(t["tail"]), t["token_ids"], t["logprobs"]) for t in conversation["turns"]],
                replies=conversation["replies"],
            )
            for conversation in stored["conversations"]
        ]
        return cls(Shape(**stored["shape"]), conversations, stored["tool_schemas"])
