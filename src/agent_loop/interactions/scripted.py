"""Interaction with fixed replies, for examples and for tests of loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_loop.interactions.base import BaseInteraction, Reply
from agent_loop.runtime.instances import OnReplay
from agent_loop.types import Message


class ScriptedInteraction(BaseInteraction):
    """Sends the same replies to every trajectory, in order. The trajectory ends one turn after the last reply.

    Args:
        replies: The replies; a str is a reply with score 0.
        name: The name that rows refer to.
    """

    on_replay: OnReplay | str = OnReplay.RERUN

    def __init__(self, replies: Sequence[Reply | str], *, name: str = "scripted") -> None:
        super().__init__({"name": name})
        self.replies = tuple(Reply(reply) if isinstance(reply, str) else reply for reply in replies)
        self._num_sent: dict[str, int] = {}

    @property
    def num_open(self) -> int:
        """Number of trajectories that are started and not finalized."""
        return len(self._num_sent)

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._num_sent[instance_id] = 0

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        num_sent = self._num_sent[instance_id]
        if num_sent == len(self.replies):
            return True, "", 0.0, {}
        self._num_sent[instance_id] = num_sent + 1
        reply = self.replies[num_sent]
        return reply.is_over, reply.content, reply.score, dict(reply.extra)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._num_sent.pop(instance_id, None)
