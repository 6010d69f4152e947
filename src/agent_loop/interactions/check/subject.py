"""The interaction under check, and the conversations it is checked with."""

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
from agent_loop.runtime.boundary import OnReplay, describe_value
from agent_loop.testing.checks import CheckFailed, require
from agent_loop.types import Message


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """An interaction, and what it is asked."""

    interaction: BaseInteraction
    kwargs: Mapping[str, Any]
    """A row's `interaction_kwargs`, without `name`."""
    prompt: Sequence[Message]
    answers: Sequence[str]
    """What the model says, turn by turn."""
    _numbers: count[int]

    @property
    def is_reproducible(self) -> bool:
        """Whether it claims that the conversation alone decides what it says."""
        return OnReplay(self.interaction.on_replay) is OnReplay.RERUN

    def new_id(self) -> str:
        """An instance id that was not used before."""
        return f"check-interaction-{next(self._numbers)}"

    @asynccontextmanager
    async def started(self) -> AsyncGenerator[str]:
        """The id of a trajectory that is started, and finalized afterwards."""
        instance_id = self.new_id()
        try:
            await self.start(instance_id)
            yield instance_id
        finally:
            await self.interaction.finalize_interaction(instance_id)

    async def start(self, instance_id: str) -> Any:
        """What `start_interaction` returns."""
        return await self.interaction.start_interaction(instance_id, **copy.deepcopy(dict(self.kwargs)))

    async def reply(self, instance_id: str, messages: list[Message]) -> InteractionReply:
        """The reply to a conversation.

        Raises:
            CheckFailed: It is no reply.
        """
        kwargs = copy.deepcopy(dict(self.kwargs))
        returned: Any = await self.interaction.generate_response(instance_id, messages, **kwargs)
        try:
            return read_reply(returned, where="generate_response")
        except InteractionBug as error:
            raise CheckFailed(str(error)) from error

    async def play(self, instance_id: str, answers: Sequence[str]) -> AsyncGenerator[InteractionReply]:
        """The replies of a conversation in which the model gives these answers, up to the one with which it is over."""
        messages = copy.deepcopy(list(self.prompt))
        for answer in answers:
            messages.append({"role": "assistant", "content": answer})
            reply = await self.reply(instance_id, copy.deepcopy(messages))
            yield reply
            if reply.is_over:
                return
            messages.append({"role": "user", "content": reply.content})

    async def conversation(self, answers: Sequence[str] | None = None) -> list[InteractionReply]:
        """The replies of a whole conversation of its own."""
        answers = self.answers if answers is None else answers
        async with self.started() as instance_id:
            return [reply async for reply in self.play(instance_id, answers)]

    def first_turn(self) -> list[Message]:
        """The prompt and the first answer."""
        return [*copy.deepcopy(list(self.prompt)), {"role": "assistant", "content": self.answers[0]}]

    def require_same(
        self, got: Sequence[InteractionReply], wanted: Sequence[InteractionReply], what: str
    ) -> None:
        """Fails unless two conversations went the same way."""
        for number, (its, first) in enumerate(zip(got, wanted, strict=False), start=1):
            require(
                its == first, f"{what}, reply {number} is {describe_value(its)}, not {describe_value(first)}"
            )
        require(len(got) == len(wanted), f"{what}, it gives {len(got)} replies, not {len(wanted)}")
