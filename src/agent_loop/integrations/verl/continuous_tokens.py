"""Token methods of loops written for verl 0.9: prompts, completions and replies as one growing list of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from agent_loop.chat.sources import split_media
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import EpisodeError
from agent_loop.types import Message

USE_EPISODE = "use self.episode(messages), which takes images and videos"


@dataclass(frozen=True, slots=True)
class MergeResult:
    """Tokens after a merge, with verl's attributes."""

    token_ids: list[int]
    """The prompt and everything after it."""
    appended_token_count: int
    kind: Literal["assistant", "context"]
    inserted_token_ids: tuple[int, ...] = ()
    """Empty: the tokens that close a turn count as appended."""
    removed_prefix_token_count: int = 0


Merged: TypeAlias = tuple[MergeResult, list[int], list[float] | None]
"""The tokens, the response mask and the log-probs after a merge."""


class ContinuousTokens:
    """Methods of verl's `AgentLoopBase` for tokens and media."""

    template: ChatTemplate
    rollout_config: Any

    async def process_multi_modal_info(self, messages: list[Message]) -> dict[str, Any]:
        """Return no media.

        Raises:
            EpisodeError: The messages contain images or videos, which only `AgentLoopBase.episode` supports.
        """
        _, media = split_media(messages)
        if media:
            raise EpisodeError(f"messages contain images or videos; {USE_EPISODE}")
        return {}

    async def process_vision_info(self, messages: list[Message]) -> dict[str, Any]:
        """Return no media, as `process_multi_modal_info`, whose earlier name this is."""
        return await self.process_multi_modal_info(messages)

    async def ct_build_initial_tokens(
        self, messages: list[Message], tools: Sequence[Mapping[str, Any]] | None = None, **media: Any
    ) -> list[int]:
        """Return the first prompt. A prompt that is too long loses its beginning, as in verl.

        Raises:
            EpisodeError: Images, videos or audio were passed, which only `AgentLoopBase.episode` supports.
            ChatTemplateError: The template refuses the messages.
        """
        given = [name for name, value in media.items() if value and name != "mm_inputs_out"]
        if given:
            raise EpisodeError(f"ct_build_initial_tokens got {given[0]}; {USE_EPISODE}")
        encoded = self.template.open_encoded(messages, tools=tools or ())
        return encoded.token_ids.tolist()[-self.rollout_config.prompt_length :]

    async def ct_merge_context_msg(
        self,
        previous_messages: list[Message],
        updated_messages: list[Message],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Merged:
        """Append messages of tools or users, and the prompt of the next turn, with a mask of 0.

        Raises:
            EpisodeError: The updated messages do not begin with the previous ones.
            ChatTemplateError: The template refuses the messages.
        """
        if updated_messages[: len(previous_messages)] != previous_messages:
            raise EpisodeError(
                "messages before the new ones changed; ct_merge_context_msg can only append messages"
            )
        new = updated_messages[len(previous_messages) :]
        appended: list[int] = []
        if new:
            last = runtime_token_ids[-1] if runtime_token_ids else None
            appended = self.template.bridge_encoded(new, last_token_id=last).token_ids.tolist()
        return (
            MergeResult([*runtime_token_ids, *appended], len(appended), "context"),
            [*response_mask, *[0] * len(appended)],
            None if response_logprobs is None else [*response_logprobs, *[0.0] * len(appended)],
        )

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> Merged:
        """Append a completion, with a mask of 1.

        Raises:
            EpisodeError: The number of log-probs differs from that of the tokens.
        """
        logprobs: list[float] | None = None
        if response_logprobs is not None:
            new = list(assistant_logprobs or ())
            if len(new) != len(assistant_token_ids):
                raise EpisodeError(
                    f"assistant_logprobs has {len(new)} values for {len(assistant_token_ids)} tokens; pass those of "
                    "the completion"
                )
            logprobs = [*response_logprobs, *new]
        return (
            MergeResult([*runtime_token_ids, *assistant_token_ids], len(assistant_token_ids), "assistant"),
            [*response_mask, *[1] * len(assistant_token_ids)],
            logprobs,
        )
