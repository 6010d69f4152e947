"""Settings of supervised training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agent_loop.config.values import Positive, Section, Tokens


class SftConfig(Section):
    """Supervised training on complete conversations: `agent-loop sft`, or steps between those of `agent-loop train`."""

    files: list[str] = []
    """Conversations in any format of `data.train_files`; or folders of runs and Parquet files of trajectories."""
    val_files: list[str] = []
    """Conversations on which `agent-loop sft` measures the loss every `trainer.val_every` steps."""
    messages_key: str = "messages"
    """Column with the messages, in the OpenAI form. An assistant message with `weight: 0` is not trained."""
    tools_key: str = "tools"
    """Column with the tool schemas of a conversation, if it has any."""
    where: str | list[str] = []
    """Conditions that a stored trajectory must fulfil, such as `reward>=1`, on the columns of `agent-loop show`."""
    best_of_group: Positive | None = None
    """Number of trajectories with the highest rewards to keep of each stored group; None keeps all."""
    max_tokens: Tokens = 4096
    """Longest conversation. Longer ones are left out and counted."""
    batch_size: Positive = 16
    """Conversations per optimiser step."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the conversations in `agent-loop sft`; None trains for `trainer.total_steps`."""
    every: Positive | None = None
    """Steps of `agent-loop train` between two supervised optimiser steps; None takes none."""

    @property
    def conditions(self) -> list[str]:
        """The conditions of `where`."""
        return [self.where] if isinstance(self.where, str) else self.where
