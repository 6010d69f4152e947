"""Users of tau2-bench: one that follows a script, and one that a language model plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agent_loop.config import Section
from agent_loop.environments.base import Reply
from agent_loop.errors import EnvironmentUnavailable, InteractionUnavailable
from agent_loop.interactions.simulated_user import SimulatedUser
from agent_loop.interactions.swapped_roles import num_replies
from agent_loop.types import Message

STOP_PHRASES = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""What the benchmark's rules for its simulated user name as the ends of a conversation."""
MAX_SCRIPTED_REPLIES = 10
CONSENT = "Yes, please go ahead. I have told you everything that I know."
_ID = "user"


class ServedUser(Section):
    """Server of the model that plays the user."""

    url: str
    model: str
    key_env: str | None = None
    temperature: float = 0.0
    max_tokens: int = 512
    timeout_s: float = 60.0
    max_retries: int = 3


class User(Protocol):
    """User of one trajectory."""

    async def opening(self) -> str:
        """Return the first message."""
        ...

    async def reply(self, messages: Sequence[Message], *, is_solved: bool) -> Reply:
        """Return the reply to the last message, which calls no tool.

        Args:
            messages: The conversation.
            is_solved: Whether the agent called all gold actions and communicated what it should.
        """
        ...

    async def close(self) -> None: ...


class ScriptedUser:
    """User that tells all it knows, then agrees to everything, until the task is solved.

    It is deterministic and needs no model. Use it for checks; it does not behave like a person.
    """

    def __init__(self, instructions: Any) -> None:
        self._parts = [instructions] if isinstance(instructions, str) else _parts(instructions)

    async def opening(self) -> str:
        return self._parts[0]

    async def reply(self, messages: Sequence[Message], *, is_solved: bool) -> Reply:
        number = num_replies(messages) + 1
        if is_solved or number > MAX_SCRIPTED_REPLIES:
            return Reply(STOP_PHRASES[0], is_over=True)
        return Reply(self._parts[number] if number < len(self._parts) else CONSENT)

    async def close(self) -> None:
        pass


class ModelUser:
    """User that a language model plays, by the benchmark's rules.

    Args:
        rules: System prompt.
        begin: Message that the user's model sees first.
    """

    def __init__(self, served: ServedUser, *, rules: str, begin: str) -> None:
        settings: Mapping[str, Any] = {
            "name": "user of tau2",
            "model": served.model,
            "base_url": served.url,
            "api_key_env": served.key_env,
            "persona": "{rules}",
            "opens": True,
            "greeting": begin,
            "stop_phrases": list(STOP_PHRASES),
            "temperature": served.temperature,
            "max_tokens": served.max_tokens,
            "timeout_s": served.timeout_s,
            "max_retries": served.max_retries,
        }
        self._user = SimulatedUser(settings)
        self._rules = rules

    async def opening(self) -> str:
        try:
            return await self._user.start_interaction(_ID, rules=self._rules) or ""
        except InteractionUnavailable as error:
            raise EnvironmentUnavailable(str(error)) from error

    async def reply(self, messages: Sequence[Message], *, is_solved: bool) -> Reply:
        # As in the benchmark, the user does not see what the agent writes next to its calls.
        seen = [message for message in messages if not message.get("tool_calls")]
        try:
            is_over, text, score, extra = await self._user.generate_response(_ID, seen)
        except InteractionUnavailable as error:
            raise EnvironmentUnavailable(str(error)) from error
        return Reply(text, score, is_over, extra)

    async def close(self) -> None:
        await self._user.finalize_interaction(_ID)


def _parts(instructions: Any) -> list[str]:
    first = (instructions.reason_for_call, instructions.known_info)
    later = (instructions.unknown_info, instructions.task_instructions)
    return ["\n".join(filter(None, first)), "\n".join(filter(None, later)) or CONSENT]
