"""Tests of system messages in the middle of a conversation."""

from __future__ import annotations

from typing import Any

import pytest

from agent_loop.chat.template import ChatTemplate
from agent_loop.servers.scripted import ScriptedReply
from agent_loop.trajectory import IncidentKind
from tests.chat.families import family
from tests.chat.test_system_messages import IN_PLACE
from tests.helpers import hermes_template, user
from tests.serve.harness import MODEL, ProgramHarness, in_order, origins


async def converse(create: Any) -> None:
    """Send a conversation with system messages at several places, in two requests."""
    first: list[Any] = [
        {"role": "system", "content": "Be brief."},
        *user("1 + 2?"),
        {"role": "developer", "content": "Answer in digits."},
    ]
    reply = await create(model=MODEL, messages=first)
    second = [
        *first,
        {"role": "assistant", "content": reply.choices[0].message.content},
        {"role": "system", "content": "It is late."},
        *user("And?"),
    ]
    await create(model=MODEL, messages=second)


@pytest.mark.parametrize("keeps_place", [False, True])
def test_they_reach_the_model_and_the_conversation_is_one_trajectory(keeps_place: bool) -> None:
    template: ChatTemplate = family(IN_PLACE) if keeps_place else hermes_template()
    reply = ScriptedReply([*template.encode("3"), min(template.end_ids)])
    harness = ProgramHarness(in_order(reply), template=template)
    [trajectory] = harness.run_virtual(converse)
    output = trajectory.output
    assert output.failure is None
    assert origins(output) == ["prompt", "model", "interaction", "model"]
    shown = template.decode(harness.server.requests[-1].prompt_ids)
    assert shown.index("1 + 2?") < shown.index("Answer in digits.") < shown.index("It is late.")
    assert shown.index("It is late.") < shown.index("And?")
    expected = [] if keeps_place else [IncidentKind.SYSTEM_MESSAGE_AS_USER]
    assert [incident.kind for incident in output.incidents] == expected
