"""The interactions of rows in the form of an environment, which replies and scores, and has no tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast
from uuid import uuid4

from agent_loop.environments.base import Environment, Reply
from agent_loop.errors import EnvironmentBug
from agent_loop.interactions.base import BaseInteraction
from agent_loop.runtime.describe import describe_value
from agent_loop.types import Message


class InteractionEnvironment(Environment):
    """Trajectory of a `BaseInteraction`. The row holds its `trajectory` and its `interaction_kwargs`."""

    def __init__(self, interaction: BaseInteraction) -> None:
        self.on_replay = interaction.on_replay
        self._interaction = interaction
        self._instance_id = ""
        self._kwargs: dict[str, Any] = {}

    async def reset(self, row: Mapping[str, Any]) -> str | None:
        self._instance_id = f"{row['trajectory']}-{uuid4().hex}"
        self._kwargs = {key: value for key, value in row["interaction_kwargs"].items() if key != "name"}
        greeting: Any = await self._interaction.start_interaction(self._instance_id, **self._kwargs)
        if not self._interaction.opens_conversation:
            return None
        if not isinstance(greeting, str | None):
            raise EnvironmentBug(
                f"start_interaction of interaction {self._interaction.name!r} returned {describe_value(greeting)}; "
                "return a str or None"
            )
        return greeting

    async def reply(self, messages: Sequence[Message]) -> Reply:
        returned = await self._interaction.generate_response(
            self._instance_id, list(messages), **self._kwargs
        )
        return as_reply(returned)

    async def reward(self, messages: Sequence[Message]) -> float | None:
        return await self._interaction.calculate_score(self._instance_id)

    async def close(self) -> None:
        if self._instance_id:
            await self._interaction.finalize_interaction(self._instance_id)


def as_reply(returned: Any) -> Reply:
    """Return what `generate_response` returned as a reply, whose values are not validated."""
    parts: tuple[Any, ...] = cast(tuple[Any, ...], returned) if isinstance(returned, tuple) else ()
    if len(parts) != 4:
        raise EnvironmentBug(
            f"generate_response returned {describe_value(returned)}; return (is_over, content, score, extra)"
        )
    is_over, content, score, extra = parts
    return Reply(content, score, is_over, extra)
