"""Interaction under check, with the conversations that the checks hold with it."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from agent_loop.errors import InteractionBug
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.session import InteractionReply, read_reply
from agent_loop.runtime.describe import describe_value
from agent_loop.runtime.instances import OnReplay
from agent_loop.testing.conformance import CheckFailed, require
from agent_loop.types import Message


@dataclass(frozen=True, slots=True, eq=False)
class CheckedInteraction:
    """Interaction under check, and the conversation to hold with it."""

    interaction: BaseInteraction
    kwargs: Mapping[str, Any]
    """A row's `interaction_kwargs`, without `name`."""
    prompt: Sequence[Message]
    answers: Sequence[str]
    """The model's messages, one per turn."""
    _numbers: count[int]

    @property
    def is_reproducible(self) -> bool:
        """Whether it declares `on_replay = rerun`: its replies depend on the conversation alone."""
        return OnReplay(self.interaction.on_replay) is OnReplay.RERUN

    def new_id(self) -> str:
        """Return a new instance id."""
        return f"check-interaction-{next(self._numbers)}"

    @asynccontextmanager
    async def started(self) -> AsyncGenerator[str]:
        """Start a trajectory, yield its id, and finalize it at the end."""
        instance_id = self.new_id()
        try:
            await self.start(instance_id)
            yield instance_id
        finally:
            await self.interaction.finalize_interaction(instance_id)

    async def start(self, instance_id: str) -> Any:
        """Call `start_interaction` and return its result."""
        return await self.interaction.start_interaction(instance_id, **copy.deepcopy(dict(self.kwargs)))

    async def reply(self, instance_id: str, messages: list[Message]) -> InteractionReply:
        """Return the reply to a conversation.

        Raises:
            CheckFailed: `generate_response` returned something else than a reply.
        """
        kwargs = copy.deepcopy(dict(self.kwargs))
        returned: Any = await self.interaction.generate_response(instance_id, messages, **kwargs)
        try:
            return read_reply(returned, where="generate_response")
        except InteractionBug as error:
            raise CheckFailed(str(error)) from error

    async def play(self, instance_id: str, answers: Sequence[str]) -> AsyncGenerator[InteractionReply]:
        """Hold a conversation with these messages of the model, and yield each reply until one ends it."""
        messages = copy.deepcopy(list(self.prompt))
        for answer in answers:
            messages.append({"role": "assistant", "content": answer})
            reply = await self.reply(instance_id, copy.deepcopy(messages))
            yield reply
            if reply.is_over:
                return
            messages.append({"role": "user", "content": reply.content})

    async def conversation(self, answers: Sequence[str] | None = None) -> list[InteractionReply]:
        """Return the replies of a conversation in a new trajectory."""
        answers = self.answers if answers is None else answers
        async with self.started() as instance_id:
            return [reply async for reply in self.play(instance_id, answers)]

    def first_turn(self) -> list[Message]:
        """Return the prompt and the first message of the model."""
        return [*copy.deepcopy(list(self.prompt)), {"role": "assistant", "content": self.answers[0]}]

    def require_same(
        self, got: Sequence[InteractionReply], wanted: Sequence[InteractionReply], what: str
    ) -> None:
        """Fail the check unless two conversations have the same replies."""
        for number, (one, other) in enumerate(zip(got, wanted, strict=False), start=1):
            require(
                one == other, f"{what}, reply {number} is {describe_value(one)}, not {describe_value(other)}"
            )
        require(len(got) == len(wanted), f"{what}, there are {len(got)} replies, not {len(wanted)}")
