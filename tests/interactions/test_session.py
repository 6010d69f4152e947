"""Interactions of single trajectories: their start, replies, score and end."""

import asyncio
from typing import Any

import pytest

from agent_loop.config import MultiTurnConfig
from agent_loop.environments.live import LiveEnvironment
from agent_loop.errors import EnvironmentBug
from agent_loop.interactions.base import BaseInteraction, Reply
from agent_loop.interactions.scripted import ScriptedInteraction
from agent_loop.rewards.function import Score
from agent_loop.testing import run_virtual
from agent_loop.types import Message

LIMITS = MultiTurnConfig(interaction_timeout_s=60, close_timeout_s=10)
MESSAGES: list[Message] = [{"role": "assistant", "content": "4"}]


def session_of(interaction: BaseInteraction, **interaction_kwargs: Any) -> LiveEnvironment:
    row = {"trajectory": "1", "interaction_kwargs": interaction_kwargs}
    return LiveEnvironment.of_interaction(interaction, row=row, limits=LIMITS)


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
    interaction = ScriptedInteraction(["Again.", Reply("Right.", score=1.0, is_over=True)])

    async def main() -> None:
        session, other = session_of(interaction), session_of(interaction)
        assert await session.reply(MESSAGES) == Reply("Again.")
        assert (await other.reply(MESSAGES)).content == "Again."
        assert interaction.num_open == 2
        assert await session.reply(MESSAGES) == Reply("Right.", score=1.0, is_over=True)
        assert await session.reply(MESSAGES) == Reply("", is_over=True)
        assert await session.reward(MESSAGES) is None
        assert await session.close() == []
        assert await other.close() == []
        assert interaction.num_open == 0

    run_virtual(main())


def test_an_interaction_is_started_at_first_use_and_finalized_once() -> None:
    interaction = Examiner(score=0.5)

    async def main() -> None:
        session = session_of(interaction, name="examiner", truth="4")
        assert not session.is_open
        await session.reply(MESSAGES)
        await session.reply(MESSAGES)
        assert session.is_open
        assert await session.reward(MESSAGES) == Score(0.5)
        await session.close()
        await session.close()
        assert not session.is_open

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
        (KeyError("level"), "of interaction 'examiner' raised KeyError: 'level'"),
        (TimeoutError("socket"), "of interaction 'examiner' raised TimeoutError: socket"),
        (hang, r"took longer than 60 s; fix it, or raise rollout\.multi_turn\.interaction_timeout_s"),
    ],
)
def test_an_interaction_that_raises_or_hangs_is_a_bug_and_is_finalized(
    stage: str, outcome: Any, message: str
) -> None:
    interaction = Examiner(**{stage: outcome})

    async def main() -> None:
        session = session_of(interaction)
        with pytest.raises(EnvironmentBug, match=message):
            await session.reply(MESSAGES)
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
        with pytest.raises(EnvironmentBug, match=r"returned .*; return "):
            await session.reply(MESSAGES)
        await session.close()

    run_virtual(main())


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (ValueError("no"), "reward of interaction 'examiner' raised ValueError: no"),
        (hang, "reward of interaction 'examiner' took longer than 10 s"),
        ("good", "reward of interaction 'examiner' returned 'good'"),
    ],
)
def test_an_error_in_calculate_score_is_a_bug(outcome: Any, message: str) -> None:
    async def main() -> None:
        session = session_of(Examiner(score=outcome))
        await session.reply(MESSAGES)
        with pytest.raises(EnvironmentBug, match=message):
            await session.reward(MESSAGES)
        await session.close()

    run_virtual(main())


@pytest.mark.parametrize(
    ("outcome", "detail"),
    [
        (OSError("gone"), "closing interaction 'examiner': OSError: gone"),
        (hang, "closing interaction 'examiner': DeadlineExpired: took longer than 10 s"),
    ],
)
def test_an_error_in_finalize_is_returned(outcome: Any, detail: str) -> None:
    async def main() -> None:
        session = session_of(Examiner(finalize=outcome))
        await session.reply(MESSAGES)
        assert await session.close() == [detail]

    run_virtual(main())


def test_an_interaction_cannot_change_the_conversation() -> None:
    class Appender(ScriptedInteraction):
        async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Any:
            messages.append({"role": "user", "content": "forged"})
            return False, "go on", 0.0, {}

    async def main() -> None:
        session = session_of(Appender([]))
        await session.reply(MESSAGES)
        await session.close()

    run_virtual(main())
    assert len(MESSAGES) == 1
