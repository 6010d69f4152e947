"""Limits on prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_loop.errors import BadPrompt
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Limits on the prompts of one server."""

    server: str
    max_model_len: int
    vocab_size: int

    def check(self, request_id: str, *, prompt_ids: IntArray, attachments: Sequence[Attachment] = ()) -> int:
        """Return the number of tokens that can be sampled after a prompt."""
        problem = ""
        if attachments:
            problem = (
                f"the request has {len(attachments)} attachments, but this server accepts text only; use "
                "rollout.engine=embedded for images"
            )
        elif len(prompt_ids) == 0:
            problem = "the prompt is empty; give at least one token"
        elif len(prompt_ids) >= self.max_model_len:
            problem = (
                f"the prompt has {len(prompt_ids)} tokens, but max_model_len {self.max_model_len} leaves room for "
                f"{self.max_model_len - 1} and one to sample; raise rollout.prompt_length or rollout.response_length, "
                "or shorten the prompt"
            )
        elif (lowest := int(prompt_ids.min())) < 0 or int(prompt_ids.max()) >= self.vocab_size:
            problem = (
                f"the prompt has token id {lowest if lowest < 0 else int(prompt_ids.max())}, but the model's "
                f"vocabulary ends at {self.vocab_size - 1}; use the ids of this model's tokenizer"
            )
        if problem:
            raise BadPrompt(problem, server=self.server, request_id=request_id)
        return self.max_model_len - len(prompt_ids)
