"""A simulated user that says what it is told: for examples, and for tests of loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.session import InteractionReply
from agent_loop.runtime.instances import OnReplay
from agent_loop.types import Message


class ScriptedInteraction(BaseInteraction):
    """Answers each trajectory with the same replies, in order; one turn past the last, the trajectory is over.

    Args:
        replies: A plain str is a reply with score 0.
        name: What rows call it by.
    """

    on_replay: OnReplay | str = OnReplay.RERUN

    def __init__(self, replies: Sequence[InteractionReply | str], *, name: str = "scripted") -> None:
        super().__init__({"name": name})
        self.replies = tuple(
            InteractionReply(reply) if isinstance(reply, str) else reply for reply in replies
        )
        self._num_said: dict[str, int] = {}

    @property
    def num_open(self) -> int:
        """Trajectories that are started and not finalized."""
        return len(self._num_said)

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._num_said[instance_id] = 0

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        num_said = self._num_said[instance_id]
        if num_said == len(self.replies):
            return True, "", 0.0, {}
        self._num_said[instance_id] = num_said + 1
        reply = self.replies[num_said]
        return reply.is_over, reply.content, reply.score, dict(reply.extra)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._num_said.pop(instance_id, None)
