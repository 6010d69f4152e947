"""Simulated user: a language model that plays the user, and sees the conversation with the roles exchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from agent_loop.config import ChatEndpoint, Positive
from agent_loop.errors import DataError, InteractionUnavailable
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.registry import read_settings
from agent_loop.loading import import_extra
from agent_loop.runtime.describe import describe_error, describe_value
from agent_loop.runtime.instances import OnReplay
from agent_loop.types import Message

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

OTHER_ROLE = {"user": "assistant", "assistant": "user"}
SILENCE = "(The assistant said nothing.)"


def with_roles_swapped(messages: Sequence[Message], *, greeting: str) -> list[Message]:
    """Return the conversation as the user sees it, with the roles of user and assistant exchanged.

    The returned turns alternate, and both the first and the last have the role `user`. System prompts, tool results
    and turns without text are dropped. Consecutive turns of one role are joined.

    Args:
        greeting: The first turn, if the user sent the first message of the conversation.
    """
    turns: list[Message] = []
    for message in messages:
        role, text = OTHER_ROLE.get(message["role"]), text_of(message)
        if role is None or not text:
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1] = {"role": role, "content": f"{turns[-1]['content']}\n\n{text}"}
        else:
            turns.append({"role": role, "content": text})
    if not turns or turns[0]["role"] == "assistant":
        turns.insert(0, {"role": "user", "content": greeting})
    if turns[-1]["role"] == "assistant":
        turns.append({"role": "user", "content": SILENCE})
    return turns


def num_replies(messages: Sequence[Message]) -> int:
    """Return the number of user messages after the first assistant message."""
    after = dropwhile(lambda message: message["role"] != "assistant", messages)
    return sum(message["role"] == "user" for message in after)


def text_of(message: Message) -> str:
    """Return the text of a message, without images."""
    content = message.get("content")
    if isinstance(content, list):
        parts = cast(list[dict[str, Any]], content)
        return "\n".join(str(part["text"]) for part in parts if part.get("type") == "text").strip()
    return str(content or "").strip()


class SimulatedUserSettings(ChatEndpoint):
    """Settings under `config` of the interaction, in addition to those of the endpoint."""

    persona: str
    """System prompt of the user: who they are, what they want, and when they are done. `{field}` inserts a field of the
    row's `interaction_kwargs`; write `{{` and `}}` for literal braces."""
    opens: bool = False
    """Whether the user sends the first message, which is added to the prompt."""
    greeting: str = "Hello! How can I help you?"
    """Assistant message that the user's model sees first, if the user sent the first message of the conversation."""
    stop_phrases: list[str] = Field(default=["###STOP###"])
    """Phrases of the user that end the trajectory. The text before the phrase is recorded."""
    max_turns: Positive | None = None
    """Maximum number of user replies. With None, only the limits of the rollout apply."""


class SimulatedUser(BaseInteraction):
    """Interaction that samples the user's replies from a model.

    The user's model sees the conversation with the roles of user and assistant exchanged, and without tools. Each reply
    scores 0. Override `generate_response` or `calculate_score` in a subclass to compute a score.
    Each reply records `user_prompt_tokens` and `user_completion_tokens`.
    """

    on_replay: OnReplay | str = OnReplay.RECORDED

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._settings = read_settings(SimulatedUserSettings, self.config)
        self.opens_conversation = self._settings.opens
        self._openai = import_extra("openai", extra="simulated-user", by=__name__)
        self._client_options = self._settings.client_options()
        self._personas: dict[str, str] = {}
        self._client: AsyncOpenAI | None = None
        """Client shared by all open trajectories. None if no trajectory is open."""

    @property
    def num_open(self) -> int:
        """Number of trajectories that are started and not finalized."""
        return len(self._personas)

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str | None:
        """Fill in the persona, and return the user's first message if the user opens the conversation."""
        self._personas[instance_id] = _filled(self._settings.persona, kwargs)
        if not self.opens_conversation:
            return None
        _, greeting, _, _ = await self._sample_reply(instance_id, [])
        return greeting

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        if num_replies(messages) == self._settings.max_turns:
            return True, "", 0.0, {}
        return await self._sample_reply(instance_id, messages)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._personas.pop(instance_id, None)
        if not self._personas and self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def _sample_reply(
        self, instance_id: str, messages: Sequence[Message]
    ) -> tuple[bool, str, float, dict[str, Any]]:
        settings = self._settings
        persona: Message = {"role": "system", "content": self._personas[instance_id]}
        completion = await self._complete(
            [persona, *with_roles_swapped(messages, greeting=settings.greeting)]
        )
        text = _text_in(completion)
        if not text:
            raise InteractionUnavailable(
                f"{self._description} returned a completion without text: {describe_value(completion)}"
            )
        ends = [index for phrase in settings.stop_phrases if (index := text.find(phrase)) >= 0]
        usage = completion.usage
        extra: dict[str, Any] = {
            "user_prompt_tokens": usage.prompt_tokens if usage else None,
            "user_completion_tokens": usage.completion_tokens if usage else None,
            "is_cut": completion.choices[0].finish_reason == "length",
        }
        return bool(ends), text[: min(ends, default=len(text))].strip(), 0.0, extra

    async def _complete(self, messages: list[Any]) -> ChatCompletion:
        settings = self._settings
        create: Any = self._open_client().chat.completions.create
        try:
            return await create(messages=messages, **settings.request_options())
        except (self._openai.APIError, ValueError) as error:  # (ValueError: the response is not valid JSON)
            retries = f"after {settings.max_retries} retries" if settings.max_retries else "without retries"
            raise InteractionUnavailable(
                f"{self._description} returned no completion ({retries}): {describe_error(error)}; "
                "check that the endpoint serves this model"
            ) from error

    def _open_client(self) -> AsyncOpenAI:
        if self._client is None:
            self._client = self._openai.AsyncOpenAI(**self._client_options)
        return cast("AsyncOpenAI", self._client)

    @property
    def _description(self) -> str:
        where = self._settings.base_url or "the default endpoint"
        return f"interaction {self.name!r}: model {self._settings.model!r} at {where}"


def _text_in(completion: Any) -> str | None:
    """Return the text of a completion, or None if it has none.

    The client does not validate responses, so that `completion` may be anything.
    """
    try:
        text: Any = completion.choices[0].message.content
    except (AttributeError, IndexError, TypeError):
        return None
    return text.strip() if isinstance(text, str) else None


def _filled(persona: str, fields: Mapping[str, Any]) -> str:
    try:
        return persona.format(**fields)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"persona cannot be formatted with the fields {sorted(fields)} of interaction_kwargs: "
            f"{describe_error(error)}"
        ) from error
