"""Interactions of single trajectories: their start, replies, score and end."""

from typing import Any

from agent_loop.environments.live import LiveEnvironment
from agent_loop.interactions.base import BaseInteraction, Reply
from agent_loop.interactions.scripted import ScriptedInteraction
from agent_loop.rewards.function import Score
from agent_loop.testing import run_virtual
from agent_loop.types import Message

MESSAGES: list[Message] = [{"role": "assistant", "content": "4"}]


def session_of(interaction: BaseInteraction, **interaction_kwargs: Any) -> LiveEnvironment:
    row = {"trajectory": "1", "interaction_kwargs": interaction_kwargs}
    return LiveEnvironment.of_interaction(interaction, row=row)


class Examiner(ScriptedInteraction):
    """Logs its calls."""

    def __init__(self) -> None:
        super().__init__(["go on"] * 2)
        self.log: list[tuple[str, dict[str, Any]]] = []

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(("start", kwargs))
        await super().start_interaction(instance_id, **kwargs)

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Any:
        self.log.append(("respond", kwargs))
        messages.append({"role": "user", "content": "forged"})
        return await super().generate_response(instance_id, messages, **kwargs)

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        self.log.append(("score", kwargs))
        return 0.5

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(("finalize", kwargs))
        await super().finalize_interaction(instance_id, **kwargs)


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
    interaction = Examiner()

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
    assert len(MESSAGES) == 1  # although the interaction appended to its copies
