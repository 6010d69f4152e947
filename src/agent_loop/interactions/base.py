"""Base class of simulated users and environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_loop.runtime.instances import OnReplay
from agent_loop.types import Message


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of an environment or an interaction to a model turn that calls no tool."""

    content: str = ""
    """The next user message. If the trajectory is over, it is recorded but not shown to the model."""
    score: float = 0.0
    """Score of the model's turn."""
    is_over: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values to record with the turn."""


class BaseInteraction(ABC):
    """Base class of interactions, which reply to model turns that call no tool.

    One object serves all trajectories of a worker. Keep the state of a trajectory under its `instance_id`. State that
    its tools share belongs under `trajectory_of(instance_id)`, which is the same for them.

    Args:
        config: The interaction's own settings from the YAML registry, including `name`.
    """

    on_replay: OnReplay | str = OnReplay.RESTART
    """How to use recorded replies when a trajectory runs again after a crash or a cancellation. By default such a
    trajectory restarts from the beginning."""
    opens_conversation: bool = False
    """Whether the interaction sends the first message. If so, it starts with the trajectory, and the text that
    `start_interaction` returns is added to the prompt. Otherwise it starts at the first model turn that calls no
    tool."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.name = str(self.config.get("name", type(self).__name__))

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str | None:
        """Set up one trajectory.

        Args:
            instance_id: The key of the trajectory in all later calls.
            **kwargs: The row's `interaction_kwargs`, without `name`.

        Returns:
            The first message, if the interaction opens the conversation. Otherwise the value is ignored.
        """

    @abstractmethod
    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Reply to the conversation so far.

        Returns:
            A tuple of four: whether the trajectory is over, the reply, the score of the last model turn, and a dict
            to record. The last reply of a trajectory is recorded but not shown to the model.

        Raises:
            InteractionUnavailable: A service that the interaction needs cannot be reached. Any other exception
                counts as a bug in the interaction.
        """

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        """Return the score of the whole trajectory, or None if it has none."""

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Free what `start_interaction` set up. Also called if `start_interaction` failed or was cancelled."""
