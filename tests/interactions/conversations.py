"""Conversations with interactions, on a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from agent_loop.interactions.base import BaseInteraction
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import Message
from tests.helpers import says
from tests.rollout.harness import Stage


def said(*texts: str) -> list[Message]:
    """The user and the assistant in turns, the user first."""
    return [
        {"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)
    ]


def converse(interaction: BaseInteraction, answers: Sequence[str], **interaction_kwargs: Any) -> Trajectory:
    """Runs one row with a model that gives these answers."""
    stage = Stage([says(answer) for answer in answers], interactions={interaction.name: interaction})
    return stage.run_one(interaction_kwargs={"name": interaction.name, **interaction_kwargs})


def ask(interaction: BaseInteraction, *conversations: list[Message], **kwargs: Any) -> list[Any]:
    """What one trajectory of the interaction answers; the last is its verdict."""

    async def main() -> list[Any]:
        await interaction.start_interaction("1", **kwargs)
        replies: list[Any] = [
            await interaction.generate_response("1", messages, **kwargs) for messages in conversations
        ]
        replies.append(await interaction.calculate_score("1"))
        await interaction.finalize_interaction("1")
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return replies

    return run_virtual(main())
