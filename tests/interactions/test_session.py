import asyncio
from typing import Any

import pytest

from agent_loop.errors import InteractionBug
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.scripted import ScriptedInteraction
from agent_loop.interactions.session import InteractionReply, InteractionSession, InteractionSessionConfig
from agent_loop.testing import run_virtual
from agent_loop.trajectory import IncidentKind
from agent_loop.types import Message

CONFIG = InteractionSessionConfig(timeout_s=60, close_timeout_s=10)
MESSAGES: list[Message] = [{"role": "assistant", "content": "4"}]


def session_of(interaction: BaseInteraction, **interaction_kwargs: Any) -> InteractionSession:
    return InteractionSession(interaction, config=CONFIG, interaction_kwargs=interaction_kwargs)


async def hang() -> None:
    await asyncio.Event().wait()


class Examiner(BaseInteraction):
    """Logs its calls. Each stage raises, calls or returns its given value."""

    def __init__(self, **stages: Any) -> None:
        super().__init__({"name": "examiner"})
        self.stages = stages
        self.log: list[tuple[str, dict[str, Any]]] = []

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        await self.pass_stage("start", kwargs)

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Any:
        return await self.pass_stage("respond", kwargs)

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> Any:
        return await self.pass_stage("score", kwargs)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        await self.pass_stage("finalize", kwargs)

    async def pass_stage(self, stage: str, kwargs: dict[str, Any]) -> Any:
        self.log.append((stage, kwargs))
        outcome = self.stages.get(stage, (False, "go on", 0.0, {}) if stage == "respond" else None)
        if isinstance(outcome, BaseException):
            raise outcome
        return await outcome() if callable(outcome) else outcome

    @property
    def events(self) -> list[str]:
        return [stage for stage, _ in self.log]


def test_a_scripted_interaction_sends_its_replies_in_order_and_then_ends() -> None:
    interaction = ScriptedInteraction(["Again.", InteractionReply("Right.", score=1.0, is_over=True)])

    async def main() -> None:
        session, other = session_of(interaction), session_of(interaction)
        assert await session.respond(MESSAGES) == InteractionReply("Again.")
        assert (await other.respond(MESSAGES)).content == "Again."
        assert interaction.num_open == 2
        assert await session.respond(MESSAGES) == InteractionReply("Right.", score=1.0, is_over=True)
        assert await session.respond(MESSAGES) == InteractionReply("", is_over=True)
        assert await session.calculate_score() is None
        assert await session.close() == []
        assert await other.close() == []
        assert interaction.num_open == 0

    run_virtual(main())


def test_an_interaction_is_started_at_first_use_and_finalized_once() -> None:
    interaction = Examiner(score=0.5)

    async def main() -> None:
        session = session_of(interaction, name="examiner", truth="4")
        assert session.num_open == 0
        await session.respond(MESSAGES)
        await session.respond(MESSAGES)
        assert session.num_open == 1
        assert await session.calculate_score() == 0.5
        await session.close()
        await session.close()
        assert session.num_open == 0

    run_virtual(main())
    given = {"truth": "4"}
    assert interaction.log == [
        ("start", given),
        ("respond", given),
        ("respond", given),
        ("score", {}),
        ("finalize", {}),
    ]


@pytest.mark.parametrize("stage", ["start", "respond"])
@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (KeyError("level"), "interaction 'examiner' raised KeyError: 'level'"),
        (TimeoutError("socket"), "interaction 'examiner' raised TimeoutError: socket"),
        (hang, "took longer than 60 s; fix it, or raise interaction_timeout_s"),
    ],
)
def test_an_interaction_that_raises_or_hangs_is_a_bug_and_is_finalized(
    stage: str, outcome: Any, message: str
) -> None:
    interaction = Examiner(**{stage: outcome})

    async def main() -> None:
        session = session_of(interaction)
        with pytest.raises(InteractionBug, match=message):
            await session.respond(MESSAGES)
        assert await session.close() == []

    run_virtual(main())
    assert interaction.events.count("finalize") == 1


@pytest.mark.parametrize(
    "returned",
    [
        "go on",
        (False, "go on", 0.0),
        ("no", "go on", 0.0, {}),
        (False, None, 0.0, {}),
        (False, "go on", None, {}),
        (False, "go on", float("inf"), {}),
        (False, "go on", 0.0, None),
    ],
)
def test_a_malformed_reply_is_a_bug(returned: Any) -> None:
    async def main() -> None:
        session = session_of(Examiner(respond=returned))
        with pytest.raises(InteractionBug, match=r"interaction 'examiner' returned .*; return "):
            await session.respond(MESSAGES)
        await session.close()

    run_virtual(main())


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (ValueError("no"), "calculate_score of interaction 'examiner' raised ValueError: no"),
        (hang, "calculate_score of interaction 'examiner' took longer than 10 s"),
        ("good", "calculate_score of interaction 'examiner' returned 'good'"),
    ],
)
def test_an_error_in_calculate_score_is_a_bug(outcome: Any, message: str) -> None:
    async def main() -> None:
        session = session_of(Examiner(score=outcome))
        await session.respond(MESSAGES)
        with pytest.raises(InteractionBug, match=message):
            await session.calculate_score()
        await session.close()

    run_virtual(main())


@pytest.mark.parametrize(
    ("outcome", "detail"),
    [
        (OSError("gone"), "closing interaction 'examiner' raised OSError: gone"),
        (hang, "closing interaction 'examiner' took longer than 10 s"),
    ],
)
def test_an_error_in_finalize_becomes_an_incident(outcome: Any, detail: str) -> None:
    async def main() -> None:
        session = session_of(Examiner(finalize=outcome))
        await session.respond(MESSAGES)
        (incident,) = await session.close()
        assert (incident.kind, incident.detail) == (IncidentKind.CLOSE_FAILED, detail)

    run_virtual(main())


def test_an_interaction_cannot_change_the_conversation() -> None:
    class Appender(ScriptedInteraction):
        async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Any:
            messages.append({"role": "user", "content": "forged"})
            return False, "go on", 0.0, {}

    async def main() -> None:
        session = session_of(Appender([]))
        await session.respond(MESSAGES)
        await session.close()

    run_virtual(main())
    assert len(MESSAGES) == 1
