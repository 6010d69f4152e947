"""Helpers that run conversations between an interaction and a scripted model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_loop.interactions.base import BaseInteraction
from agent_loop.trajectory import Trajectory
from agent_loop.types import Message
from tests.helpers import text_reply
from tests.rollout.harness import WorkerHarness


def alternating(*texts: str) -> list[Message]:
    """Return messages of the user and the assistant in turns, the user's first."""
    return [
        {"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)
    ]


def converse(interaction: BaseInteraction, answers: Sequence[str], **interaction_kwargs: Any) -> Trajectory:
    """Run one row with a model that returns these answers."""
    harness = WorkerHarness(list(map(text_reply, answers)), interactions={interaction.name: interaction})
    return harness.run_one(interaction_kwargs={"name": interaction.name, **interaction_kwargs})
