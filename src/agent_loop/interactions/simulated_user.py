"""A user played by a language model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from agent_loop.config import NotNegative, Positive, PositiveSeconds, Section, Temperature, Tokens
from agent_loop.errors import ConfigError, DataError, InteractionUnavailable
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.flipping import flipped, num_replies
from agent_loop.interactions.settings import read_settings
from agent_loop.loading import import_extra
from agent_loop.runtime.describe import describe_error, describe_value
from agent_loop.runtime.instances import OnReplay
from agent_loop.types import Message

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

NO_KEY = "none"
"""For endpoints that ask for no key; clients insist on one."""


class SimulatedUserSettings(Section):
    """`config` of the interaction."""

    model: str
    """The name under which the endpoint serves the model."""
    persona: str
    """The user's system prompt: who they are, what they want, when they are done. `{field}` is a field of the row's
    `interaction_kwargs`; braces that are meant as such are doubled."""
    base_url: str | None = None
    """Of any endpoint with OpenAI's chat completions, `agent-loop serve` among them, as in `http://host:8000/v1`; None
    is what the variable OPENAI_BASE_URL says, or OpenAI's own."""
    api_key_env: str | None = None
    """The environment variable that holds the key; None where none is asked for."""
    opens: bool = False
    """The user speaks first: what they say is added to the prompt."""
    greeting: str = "Hello! How can I help you?"
    """What the user is told that the assistant said, where the user spoke first."""
    stop_phrases: list[str] = Field(default=["###STOP###"])
    """The trajectory is over when the user says one of these; what comes before it is recorded."""
    max_turns: Positive | None = None
    """So many replies of the user at most; None leaves it to the limits of the rollout."""
    temperature: Temperature | None = None
    """None leaves it to the endpoint."""
    max_tokens: Tokens = 512
    """Of one reply."""
    timeout_s: PositiveSeconds = 60.0
    """One attempt at a reply."""
    max_retries: NotNegative = 3
    """After a broken connection, a timeout, or an answer that says busy or broken; each waits longer than the last."""
    extra_body: dict[str, Any] = Field(default={})
    """Further fields of each request."""


class SimulatedUser(BaseInteraction):
    """Asks a model what the user would say.

    It sees the conversation from the user's side: its own words as the assistant's, the assistant's as the user's, and
    no tools. Each reply scores 0; a subclass that knows better overrides `generate_response` or `calculate_score`.
    Each reply records `user_prompt_tokens` and `user_completion_tokens`.
    """

    on_replay: OnReplay | str = OnReplay.RECORDED

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._settings = read_settings(SimulatedUserSettings, self.config)
        self.opens_conversation = self._settings.opens
        self._openai = import_extra("openai", extra="simulated-user", by=__name__)
        self._key = _key(self._settings.api_key_env)
        self._personas: dict[str, str] = {}
        self._client: AsyncOpenAI | None = None
        """Of all trajectories that are open."""

    @property
    def num_open(self) -> int:
        """Trajectories that are started and not finalized."""
        return len(self._personas)

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str | None:
        """Raises: DataError: The row lacks a field of the persona."""
        self._personas[instance_id] = _filled(self._settings.persona, kwargs)
        if not self.opens_conversation:
            return None
        _, words, _, _ = await self._say(instance_id, [])
        return words

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        if num_replies(messages) == self._settings.max_turns:
            return True, "", 0.0, {}
        return await self._say(instance_id, messages)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._personas.pop(instance_id, None)
        if not self._personas and self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def _say(
        self, instance_id: str, messages: Sequence[Message]
    ) -> tuple[bool, str, float, dict[str, Any]]:
        settings = self._settings
        persona: Message = {"role": "system", "content": self._personas[instance_id]}
        completion = await self._complete([persona, *flipped(messages, greeting=settings.greeting)])
        said = _text_in(completion)
        if not said:
            raise InteractionUnavailable(f"{self._who} answered without a text: {describe_value(completion)}")
        ends = [place for phrase in settings.stop_phrases if (place := said.find(phrase)) >= 0]
        usage = completion.usage
        extra: dict[str, Any] = {
            "user_prompt_tokens": usage.prompt_tokens if usage else None,
            "user_completion_tokens": usage.completion_tokens if usage else None,
            "is_cut": completion.choices[0].finish_reason == "length",
        }
        return bool(ends), said[: min(ends, default=len(said))].strip(), 0.0, extra

    async def _complete(self, messages: list[Any]) -> ChatCompletion:
        settings = self._settings
        asked: dict[str, Any] = {} if settings.temperature is None else {"temperature": settings.temperature}
        create: Any = self._open_client().chat.completions.create
        try:
            return await create(
                model=settings.model,
                messages=messages,
                max_tokens=settings.max_tokens,
                extra_body=settings.extra_body or None,
                **asked,
            )
        except (self._openai.APIError, ValueError) as error:  # (the latter of an answer that is no JSON)
            tried = f"after {settings.max_retries} retries" if settings.max_retries else "without retries"
            raise InteractionUnavailable(
                f"{self._who} gave no answer ({tried}): {describe_error(error)}; see that it serves this model"
            ) from error

    def _open_client(self) -> AsyncOpenAI:
        if self._client is None:
            self._client = self._openai.AsyncOpenAI(
                api_key=self._key,
                base_url=self._settings.base_url,
                timeout=self._settings.timeout_s,
                max_retries=self._settings.max_retries,
            )
        return cast("AsyncOpenAI", self._client)

    @property
    def _who(self) -> str:
        where = self._settings.base_url or "the default endpoint"
        return f"interaction {self.name!r}: model {self._settings.model!r} at {where}"


def _text_in(completion: Any) -> str | None:
    """What the model said; None if the endpoint answered with something else, which the client passes on as it is."""
    try:
        text: Any = completion.choices[0].message.content
    except (AttributeError, IndexError, TypeError):
        return None
    return text.strip() if isinstance(text, str) else None


def _key(variable: str | None) -> str:
    if variable is None:
        return NO_KEY
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f"api_key_env is {variable!r}, but that variable is not set")
    return key


def _filled(persona: str, fields: Mapping[str, Any]) -> str:
    try:
        return persona.format(**fields)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"the persona cannot be filled from interaction_kwargs with the fields {sorted(fields)}: "
            f"{describe_error(error)}"
        ) from error
