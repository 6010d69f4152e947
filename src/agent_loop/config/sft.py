"""Settings of supervised training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agent_loop.config.values import Positive, Section, Tokens


class SftConfig(Section):
    """Supervised training on complete conversations: `agent-loop sft`, or steps between those of `agent-loop train`."""

    files: list[str] = []
    """Files of conversations, in any format of `data.train_files`; or folders of runs and Parquet files of
    trajectories, which are trained on the tokens that the model sampled."""
    val_files: list[str] = []
    """Conversations on which `agent-loop sft` measures the loss every `trainer.val_every` steps."""
    messages_key: str = "messages"
    """Column with the messages, in the OpenAI form. An assistant message with `weight: 0` is not trained."""
    tools_key: str = "tools"
    """Column with the tool schemas of a conversation, if it has any."""
    where: str | list[str] = []
    """Conditions that a stored trajectory must fulfil, such as `reward>=1`. The columns are those of `agent-loop
    show`."""
    best_of_group: Positive | None = None
    """Number of trajectories with the highest rewards that are kept of each group of stored trajectories; None keeps
    all."""
    max_tokens: Tokens = 4096
    """Longest conversation. Longer ones are left out, and their number is reported."""
    batch_size: Positive = 16
    """Conversations per optimiser step."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the conversations in `agent-loop sft`; None trains for `trainer.total_steps`."""
    every: Positive | None = None
    """Number of steps of `agent-loop train` after which it takes one supervised optimiser step. None takes none."""

    @property
    def conditions(self) -> list[str]:
        """The conditions of `where`."""
        return [self.where] if isinstance(self.where, str) else self.where
