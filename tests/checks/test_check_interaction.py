"""The checks of interactions pass the interactions of the package, and find each kind of fault."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agent_loop.checks import check_interaction
from agent_loop.checks.interaction import INTERACTION_CHECKS
from agent_loop.environments.gymnasium import GymnasiumInteraction
from agent_loop.errors import ConfigError, ContractError
from agent_loop.integrations.verl.gsm8k import Gsm8kInteraction
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.scripted import ScriptedInteraction
from agent_loop.interactions.simulated_user import SimulatedUser
from agent_loop.runtime.instances import OnReplay
from agent_loop.testing import run_virtual
from agent_loop.types import Message
from tests.environments.gymnasium.test_interaction import FROZEN_LAKE
from tests.interactions.endpoint import endpoint

ANSWERS = ("#### 41", "I give up.", "#### 42")


class Tutor(Gsm8kInteraction):
    """GSM8K interaction without fault. Each subclass has one fault."""

    def __init__(self) -> None:
        super().__init__({"name": "tutor"})


def failures(interaction: BaseInteraction, **options: Any) -> list[str]:
    arguments = {"interaction_kwargs": {"ground_truth": "42"}, "answers": ANSWERS, **options}
    report = asyncio.run(check_interaction(interaction, timeout_s=1.0, **arguments))
    return [result.name for result in report.failures]


def test_the_built_in_interactions_follow_the_contract() -> None:
    assert failures(Tutor()) == []
    assert failures(ScriptedInteraction(["Again.", "Again.", "Bye."]), interaction_kwargs={}) == []
    lake = GymnasiumInteraction({**FROZEN_LAKE, "on_replay": "rerun"})
    ways = ["move down", "move right", "fly"]
    assert failures(lake, interaction_kwargs={"seed": 1}, answers=ways) == []


def test_a_simulated_user_follows_the_contract() -> None:
    async def main() -> None:
        async with endpoint(*["Go on."] * 60) as served:
            settings = {"model": "any", "persona": "You are {role}.", "base_url": served.url, "opens": True}
            report = await check_interaction(SimulatedUser(settings), interaction_kwargs={"role": "Ada"})
            report.raise_if_failed()
            assert report.named("skipped") == ["the same conversation gets the same replies"]

    asyncio.run(main())


class Opener(Tutor):
    opens_conversation = True

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> Any:
        await super().start_interaction(instance_id, **kwargs)
        return 3


class BadReplay(Tutor):
    on_replay = "sometimes"


class NeedsReplies(Tutor):
    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        return self._scores[instance_id][-1]


class Terse(Tutor):
    async def generate_response(self, *args: Any, **kwargs: Any) -> Any:
        return (await super().generate_response(*args, **kwargs))[:3]


class RecordsObjects(Tutor):
    async def generate_response(self, *args: Any, **kwargs: Any) -> Any:
        is_over, content, score, _ = await super().generate_response(*args, **kwargs)
        return is_over, content, score, {"why": object()}


class Appends(Tutor):
    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Any:
        reply = await super().generate_response(instance_id, messages, **kwargs)
        messages.append({"role": "user", "content": reply[1]})
        return reply


class ScoresWithText(Tutor):
    async def calculate_score(self, instance_id: str, **kwargs: Any) -> Any:
        return "good"


class NeedsNonemptyText(Tutor):
    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Any:
        assert messages[-1]["content"][0]
        return await super().generate_response(instance_id, messages, **kwargs)


class NoTools(Tutor):
    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Any:
        assert {message["role"] for message in messages} <= {"user", "assistant"}
        return await super().generate_response(instance_id, messages, **kwargs)


class NumbersItsReplies(Tutor):
    num_calls = 0

    async def generate_response(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        is_over, content, score, extra = await super().generate_response(*args, **kwargs)
        return is_over, f"{content} ({self.num_calls})", score, extra


class SharesState(Tutor):
    """Shares its state between trajectories."""

    on_replay = OnReplay.RERUN

    def __init__(self) -> None:
        super().__init__()
        self.num_said = 0

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        await super().start_interaction(instance_id, **kwargs)
        self.num_said = 0

    async def generate_response(self, *args: Any, **kwargs: Any) -> Any:
        self.num_said += 1
        _, content, score, extra = await super().generate_response(*args, **kwargs)
        return False, f"{content} ({self.num_said})", score, extra


class FinalizesNothing(Tutor):
    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        pass


class InsistsOnStart(Tutor):
    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._scores[instance_id]


class HangsInFinalize(Tutor):
    """Interaction whose finalize hangs after a cancelled reply."""

    def __init__(self) -> None:
        super().__init__()
        self.answering: set[str] = set()

    async def generate_response(self, instance_id: str, *args: Any, **kwargs: Any) -> Any:
        self.answering.add(instance_id)
        await asyncio.sleep(0.001)
        self.answering.discard(instance_id)
        return await super().generate_response(instance_id, *args, **kwargs)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        if instance_id in self.answering:
            await asyncio.Event().wait()
        await super().finalize_interaction(instance_id, **kwargs)


class Blocks(Tutor):
    async def generate_response(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.11)  # noqa: ASYNC251  (this is the fault)
        return await super().generate_response(*args, **kwargs)


@pytest.mark.parametrize(
    ("faulty", "check"),
    [
        (BadReplay, "on_replay is valid"),
        (Opener, "the opening message is text"),
        (NeedsReplies, "a trajectory may end before its first reply"),
        (Terse, "a reply is (terminate, content, score, extra)"),
        (RecordsObjects, "the extra data of a reply can be written as JSON"),
        (Appends, "the messages passed in are not changed"),
        (ScoresWithText, "calculate_score returns a number or None"),
        (NeedsNonemptyText, "an empty message of the model gets a reply"),
        (NoTools, "tool calls in the conversation are accepted"),
        (NumbersItsReplies, "the same conversation gets the same replies"),
        (SharesState, "concurrent trajectories do not share state"),
        (FinalizesNothing, "finalize_interaction leaves nothing behind"),
        (InsistsOnStart, "a trajectory whose start failed can be finalized"),
        (HangsInFinalize, "a trajectory cancelled during a reply can be finalized"),
        (Blocks, "the interaction does not block the event loop"),
    ],
)
def test_a_fault_is_found(faulty: type[Tutor], check: str) -> None:
    assert check in failures(faulty())


def test_every_check_is_tested_with_a_fault() -> None:
    parametrized = next(mark for mark in test_a_fault_is_found.pytestmark if mark.name == "parametrize")
    assert {check for _, check in parametrized.args[1]} == set(INTERACTION_CHECKS.names)


def test_a_check_that_hangs_fails_and_the_report_names_it() -> None:
    class Hangs(Tutor):
        async def generate_response(self, *args: Any, **kwargs: Any) -> Any:
            await asyncio.Event().wait()

    report = run_virtual(check_interaction(Hangs(), interaction_kwargs={"ground_truth": "42"}))
    assert "it took longer than 60 s" in [result.detail for result in report.failures]
    with pytest.raises(ContractError, match=r"interaction 'tutor': \d+ of 15 checks failed\n  a reply is"):
        report.raise_if_failed()


def test_the_checks_need_a_message_of_the_model() -> None:
    with pytest.raises(ConfigError, match="at least one answer"):
        asyncio.run(check_interaction(Tutor(), answers=()))
