"""Conformance checks of interactions: does an implementation of `BaseInteraction` follow its contract?"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from agent_loop.errors import ConfigError, InteractionBug
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.session import InteractionReply, read_reply, read_score
from agent_loop.runtime.describe import describe_value
from agent_loop.runtime.incidents import IncidentCollector
from agent_loop.runtime.instances import OnReplay
from agent_loop.testing.conformance import (
    CheckFailed,
    CheckReport,
    CheckSkipped,
    CheckSuite,
    OnResult,
    require,
    require_forgotten,
    require_no_blocking,
)
from agent_loop.types import Message

PROMPT: Sequence[Message] = ({"role": "user", "content": "Begin."},)
ANSWERS = ("I do not know.", "#### 42", "Goodbye.")


async def check_interaction(
    interaction: BaseInteraction,
    *,
    interaction_kwargs: Mapping[str, Any] | None = None,
    prompt: Sequence[Message] = PROMPT,
    answers: Sequence[str] = ANSWERS,
    timeout_s: float = 60.0,
    on_result: OnResult | None = None,
) -> CheckReport:
    """Check that an interaction follows the contract of `BaseInteraction`.

    The checks start and finalize one or two dozen trajectories.

    Args:
        interaction_kwargs: The `interaction_kwargs` of a row.
        prompt: The messages of a row.
        answers: The model's messages, one per turn. Give one of each kind that the interaction distinguishes.
        timeout_s: Time limit of each check.
        on_result: Called with each result as soon as it is known.

    Raises:
        ConfigError: `answers` is empty.
    """
    if not answers:
        raise ConfigError("check_interaction needs at least one answer of the model")
    kwargs = {key: value for key, value in (interaction_kwargs or {}).items() if key != "name"}
    subject = CheckedInteraction(interaction, kwargs, prompt, answers)
    return await INTERACTION_CHECKS.run(
        subject, name=f"interaction {interaction.name!r}", timeout_s=timeout_s, on_result=on_result
    )


@dataclass(frozen=True, slots=True, eq=False)
class CheckedInteraction:
    """Interaction under check, and the conversation to hold with it."""

    interaction: BaseInteraction
    kwargs: Mapping[str, Any]
    """A row's `interaction_kwargs`, without `name`."""
    prompt: Sequence[Message]
    answers: Sequence[str]
    """The model's messages, one per turn."""
    _numbers: count[int] = field(default_factory=count)

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
        """Return the reply to a conversation."""
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


INTERACTION_CHECKS = CheckSuite[CheckedInteraction]()
check = INTERACTION_CHECKS.check


@check("on_replay is valid")
async def _on_replay(subject: CheckedInteraction) -> str:
    return str(OnReplay(subject.interaction.on_replay))


@check("the opening message is text")
async def _opening(subject: CheckedInteraction) -> str:
    if not subject.interaction.opens_conversation:
        raise CheckSkipped("it does not open the conversation")
    instance_id = subject.new_id()
    try:
        opening: Any = await subject.start(instance_id)
    finally:
        await subject.interaction.finalize_interaction(instance_id)
    require(
        opening is None or isinstance(opening, str), f"start_interaction returned {describe_value(opening)}"
    )
    return describe_value(opening)


@check("a trajectory may end before its first reply")
async def _unused(subject: CheckedInteraction) -> None:
    async with subject.started() as instance_id:
        await _require_score(subject, instance_id)


@check("a reply is (terminate, content, score, extra)")
async def _replies(subject: CheckedInteraction) -> str:
    replies = await subject.conversation()
    state = "ended" if replies[-1].is_over else "not ended"
    return (
        f"{state} after {len(replies)} replies, scores {', '.join(f'{reply.score:g}' for reply in replies)}"
    )


@check("the extra data of a reply can be written as JSON")
async def _extra(subject: CheckedInteraction) -> None:
    with IncidentCollector("check") as collector:
        replies = await subject.conversation()
    for incident in collector.incidents:
        require(False, f"it cannot be written as JSON: {incident.detail}")
    for reply in replies:
        try:
            json.dumps(dict(reply.extra))
        except (TypeError, ValueError) as error:
            require(False, f"{describe_value(reply.extra)} cannot be written as JSON: {error}")


@check("the messages passed in are not changed")
async def _messages(subject: CheckedInteraction) -> None:
    async with subject.started() as instance_id:
        given = subject.first_turn()
        before = copy.deepcopy(given)
        await subject.reply(instance_id, given)
        require(given == before, f"generate_response changed the messages to {describe_value(given)}")


@check("calculate_score returns a number or None")
async def _score(subject: CheckedInteraction) -> str:
    async with subject.started() as instance_id:
        async for _ in subject.play(instance_id, subject.answers):
            pass
        return await _require_score(subject, instance_id)


@check("an empty message of the model gets a reply")
async def _empty(subject: CheckedInteraction) -> None:
    async with subject.started() as instance_id:
        await subject.reply(instance_id, [*subject.first_turn()[:-1], {"role": "assistant", "content": ""}])


@check("tool calls in the conversation are accepted")
async def _tools(subject: CheckedInteraction) -> None:
    call: Message = {"type": "function", "id": "1", "function": {"name": "look", "arguments": {}}}
    async with subject.started() as instance_id:
        *prompt, answer = subject.first_turn()
        await subject.reply(
            instance_id,
            [
                *prompt,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "look", "content": "nothing"},
                answer,
            ],
        )


@check("the same conversation gets the same replies")
async def _again(subject: CheckedInteraction) -> None:
    if not subject.is_reproducible:
        raise CheckSkipped("it does not declare on_replay = rerun")
    subject.require_same(
        await subject.conversation(), await subject.conversation(), "when the conversation is repeated"
    )


@check("concurrent trajectories do not share state")
async def _separate(subject: CheckedInteraction) -> str:
    answers, others = list(subject.answers), list(reversed(subject.answers))
    alone, other_alone = await subject.conversation(answers), await subject.conversation(others)
    async with subject.started() as one, subject.started() as two:
        plays = [subject.play(one, answers), subject.play(two, others)]
        together: list[list[Any]] = [[], []]
        for _ in range(len(answers)):
            for play, replies in zip(plays, together, strict=True):
                reply = await anext(play, None)
                if reply is not None:
                    replies.append(reply)
    if not subject.is_reproducible:
        return "both got replies, which were not compared: it does not declare on_replay = rerun"
    subject.require_same(together[0], alone, "beside another trajectory")
    subject.require_same(together[1], other_alone, "beside another trajectory")
    return f"{len(together[0])} and {len(together[1])} replies"


@check("finalize_interaction leaves nothing behind")
async def _forgotten(subject: CheckedInteraction) -> None:
    instance_id = subject.new_id()
    try:
        await subject.start(instance_id)
        await subject.reply(instance_id, subject.first_turn())
    finally:
        await subject.interaction.finalize_interaction(instance_id)
    require_forgotten(instance_id, subject.interaction, after="finalize_interaction")


@check("a trajectory whose start failed can be finalized")
async def _never_started(subject: CheckedInteraction) -> None:
    await subject.interaction.finalize_interaction(subject.new_id())


@check("a trajectory cancelled during a reply can be finalized")
async def _cancelled(subject: CheckedInteraction) -> None:
    async with subject.started() as instance_id, asyncio.TaskGroup() as group:
        task = group.create_task(subject.reply(instance_id, subject.first_turn()))
        await asyncio.sleep(0)
        task.cancel()


@check("the interaction does not block the event loop")
async def _blocking(subject: CheckedInteraction) -> str:
    async with subject.started() as instance_id:
        return await require_no_blocking(lambda: subject.reply(instance_id, subject.first_turn()))


async def _require_score(subject: CheckedInteraction, instance_id: str) -> str:
    score: Any = await subject.interaction.calculate_score(instance_id)
    if score is None:
        return "None"
    return f"{read_score(score, where='calculate_score'):g}"
