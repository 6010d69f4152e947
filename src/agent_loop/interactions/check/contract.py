"""The sentences of the contract."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from agent_loop.interactions.check.subject import Subject
from agent_loop.interactions.session import read_score
from agent_loop.runtime.boundary import OnReplay, describe_value
from agent_loop.runtime.row_notes import RowNotes
from agent_loop.testing.checks import CheckSkipped, place_held, require, require_no_blocking
from agent_loop.types import Message

CheckFunction: TypeAlias = Callable[[Subject], Coroutine[Any, Any, str | None]]
CHECKS: dict[str, CheckFunction] = {}


def check(name: str) -> Callable[[CheckFunction], CheckFunction]:
    """Adds a function to the checks."""

    def add(function: CheckFunction) -> CheckFunction:
        CHECKS[name] = function
        return function

    return add


@check("it says what becomes of its replies after a crash")
async def _on_replay(subject: Subject) -> str:
    return str(OnReplay(subject.interaction.on_replay))


@check("what it opens the conversation with is text")
async def _opening(subject: Subject) -> str:
    if not subject.interaction.opens_conversation:
        raise CheckSkipped("it does not open the conversation")
    instance_id = subject.new_id()
    try:
        words: Any = await subject.start(instance_id)
    finally:
        await subject.interaction.finalize_interaction(instance_id)
    require(words is None or isinstance(words, str), f"start_interaction returned {describe_value(words)}")
    return describe_value(words)


@check("a trajectory may end before it is asked anything")
async def _unused(subject: Subject) -> None:
    async with subject.started() as instance_id:
        await _require_verdict(subject, instance_id)


@check("a reply says whether it is over, what, how good the turn was, and what to record")
async def _replies(subject: Subject) -> str:
    replies = await subject.conversation()
    how = "over" if replies[-1].is_over else "not over"
    return f"{how} after {len(replies)} replies, scores {', '.join(f'{reply.score:g}' for reply in replies)}"


@check("what a reply records can be written to a file")
async def _extra(subject: Subject) -> None:
    with RowNotes("check") as notes:
        replies = await subject.conversation()
    for incident in notes.incidents:
        require(False, f"JSON has no form for it: {incident.detail}")
    for reply in replies:
        try:
            json.dumps(dict(reply.extra))
        except (TypeError, ValueError) as error:
            require(False, f"JSON has no form for {describe_value(reply.extra)}: {error}")


@check("the conversation it is given stays as it is")
async def _messages(subject: Subject) -> None:
    async with subject.started() as instance_id:
        given = subject.first_turn()
        before = copy.deepcopy(given)
        await subject.reply(instance_id, given)
        require(given == before, f"generate_response changed the messages to {describe_value(given)}")


@check("the verdict is a number, or None")
async def _verdict(subject: Subject) -> str:
    async with subject.started() as instance_id:
        async for _ in subject.play(instance_id, subject.answers):
            pass
        return await _require_verdict(subject, instance_id)


@check("an answer without words is answered too")
async def _silence(subject: Subject) -> None:
    async with subject.started() as instance_id:
        await subject.reply(instance_id, [*subject.first_turn()[:-1], {"role": "assistant", "content": ""}])


@check("tools in the conversation do not disturb it")
async def _tools(subject: Subject) -> None:
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


@check("asked the same again, it says the same")
async def _again(subject: Subject) -> None:
    if not subject.is_reproducible:
        raise CheckSkipped("it does not claim on_replay = rerun")
    subject.require_same(
        await subject.conversation(), await subject.conversation(), "in the same conversation once more"
    )


@check("trajectories that run at once are told apart")
async def _apart(subject: Subject) -> str:
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
        return "both went on; what they said cannot be compared, as it does not claim on_replay = rerun"
    subject.require_same(together[0], alone, "beside another one")
    subject.require_same(together[1], other_alone, "beside another one")
    return f"{len(together[0])} and {len(together[1])} replies"


@check("a trajectory that is over leaves nothing behind")
async def _forgotten(subject: Subject) -> None:
    instance_id = subject.new_id()
    try:
        await subject.start(instance_id)
        await subject.reply(instance_id, subject.first_turn())
    finally:
        await subject.interaction.finalize_interaction(instance_id)
    place = place_held(instance_id, subject.interaction)
    require(place is None, f"its id is still in self.{place} after finalize_interaction")


@check("a trajectory whose start failed can be finalized")
async def _never_started(subject: Subject) -> None:
    await subject.interaction.finalize_interaction(subject.new_id())


@check("a trajectory that is cancelled while it is answered can be finalized")
async def _cancelled(subject: Subject) -> None:
    async with subject.started() as instance_id, asyncio.TaskGroup() as group:
        task = group.create_task(subject.reply(instance_id, subject.first_turn()))
        await asyncio.sleep(0)
        task.cancel()


@check("others go on while it answers")
async def _blocking(subject: Subject) -> str:
    async with subject.started() as instance_id:
        return await require_no_blocking(lambda: subject.reply(instance_id, subject.first_turn()))


async def _require_verdict(subject: Subject, instance_id: str) -> str:
    score: Any = await subject.interaction.calculate_score(instance_id)
    if score is None:
        return "None"
    return f"{read_score(score, where='calculate_score'):g}"
