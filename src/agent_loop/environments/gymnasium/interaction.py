"""Interaction that plays a Gymnasium environment through text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from agent_loop.environments.gymnasium.world import GymnasiumSettings, TextForm, World
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.settings import read_settings
from agent_loop.interactions.swapped_roles import text_of
from agent_loop.runtime.threads import OneThread
from agent_loop.seeds import trajectory_seed
from agent_loop.types import Message

LARGEST_SEED = 2**31 - 1


class GymnasiumInteraction(BaseInteraction):
    """Plays one environment per trajectory.

    The environment's observations are the user turns, and its rewards are the scores of the model's turns. Their sum
    is the score of the trajectory.

    A row's `interaction_kwargs` may hold `seed` and `options` for `reset`; other keys go to `gymnasium.make`.
    Without a `seed` in the row, each trajectory derives its own from `rollout.seed`.
    Each reply records `terminated` and `truncated`. Every environment runs in its own thread.
    """

    opens_conversation = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        settings = read_settings(GymnasiumSettings, self.config)
        self.on_replay = settings.on_replay
        self._form = TextForm.of(settings)
        self._games: dict[str, tuple[World, OneThread]] = {}

    async def start_interaction(
        self,
        instance_id: str,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        env_kwargs = {key: value for key, value in kwargs.items() if value is not None}
        world, thread = World(self._form), OneThread(f"{self.name}-{instance_id[:8]}")
        self._games[instance_id] = world, thread
        if seed is None and (derived := trajectory_seed(self.name)) is not None:
            seed = derived & LARGEST_SEED
        return await thread.run(partial(world.reset, seed=seed, options=options, **env_kwargs))

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        world, thread = self._games[instance_id]
        reply = await thread.run(world.play, text_of(messages[-1]))
        return reply.is_over, reply.content, reply.score, dict(reply.extra)

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        world, _ = self._games[instance_id]
        return world.total

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        if instance_id not in self._games:
            return
        world, thread = self._games.pop(instance_id)
        try:
            await thread.run(world.close)
        finally:
            thread.shutdown()
