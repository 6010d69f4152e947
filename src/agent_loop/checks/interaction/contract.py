"""Checks of the contract of `BaseInteraction`."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

from agent_loop.checks.interaction.checked_interaction import CheckedInteraction
from agent_loop.interactions.session import read_score
from agent_loop.runtime.describe import describe_value
from agent_loop.runtime.incidents import IncidentCollector
from agent_loop.runtime.instances import OnReplay
from agent_loop.testing.blocking import require_no_blocking
from agent_loop.testing.conformance import CheckSkipped, CheckSuite, require
from agent_loop.testing.leaks import require_forgotten
from agent_loop.types import Message

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
