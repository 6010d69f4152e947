"""What a simulated user or an environment is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from agent_loop.runtime.instances import OnReplay
from agent_loop.types import Message


class BaseInteraction(ABC):
    """Answers the model where no tool does. The object is shared by all trajectories of a worker; what belongs to
    one trajectory is kept under its `instance_id`.

    Args:
        config: The interaction's own settings, as given in the YAML registry; `name` is among them.
    """

    on_replay: OnReplay | str = OnReplay.RESTART
    """What becomes of recorded replies when a trajectory is run again after a crash or a cancellation: say it of your
    interaction, or such trajectories begin anew."""
    opens_conversation: bool = False
    """It speaks before the model does: it is started with the trajectory, and what `start_interaction` returns is added
    to the prompt. Otherwise it is started when the model has said something that no tool answers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.name = str(self.config.get("name", type(self).__name__))

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str | None:
        """Sets up one trajectory. `kwargs` are the row's `interaction_kwargs`, without `name`.

        Returns:
            Where the interaction opens the conversation, its first words; else anything, which is not looked at.
        """

    @abstractmethod
    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answers the conversation so far.

        Returns:
            Whether the trajectory is over, the answer, the score of the turn that is answered, and anything worth
            recording. Where it is over, the answer is recorded but not shown to the model.

        Raises:
            InteractionUnavailable: What it needs cannot be reached; any other exception counts as a bug in it.
        """

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        """The verdict on the whole trajectory; None if there is none."""

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Frees what `start_interaction` set up, which may be nothing or only a part."""
