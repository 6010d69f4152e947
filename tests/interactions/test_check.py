"""The conformance suite, on what ships; each fault that it is for is found."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agent_loop.errors import ConfigError, ContractError
from agent_loop.integrations.verl.gsm8k import Gsm8kInteraction
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.check import check_interaction
from agent_loop.interactions.gymnasium import GymnasiumInteraction
from agent_loop.interactions.scripted import ScriptedInteraction
from agent_loop.interactions.simulated_user import SimulatedUser
from agent_loop.runtime.instances import OnReplay
from agent_loop.testing import run_virtual
from agent_loop.types import Message
from tests.interactions.endpoint import endpoint
from tests.interactions.test_gymnasium import FROZEN_LAKE

ANSWERS = ("#### 41", "I give up.", "#### 42")


class Tutor(Gsm8kInteraction):
    """The shipped one; a subclass has one fault."""

    def __init__(self) -> None:
        super().__init__({"name": "tutor"})


def failures(interaction: BaseInteraction, **options: Any) -> list[str]:
    asked = {"interaction_kwargs": {"ground_truth": "42"}, "answers": ANSWERS, **options}
    report = asyncio.run(check_interaction(interaction, timeout_s=1.0, **asked))
    return [result.name for result in report.failures]


def test_the_shipped_interactions_keep_the_whole_contract() -> None:
    assert failures(Tutor()) == []
    assert failures(ScriptedInteraction(["Again.", "Again.", "Bye."]), interaction_kwargs={}) == []
    lake = GymnasiumInteraction({**FROZEN_LAKE, "on_replay": "rerun"})
    ways = ["move down", "move right", "fly"]
    assert failures(lake, interaction_kwargs={"seed": 1}, answers=ways) == []


def test_a_simulated_user_keeps_the_contract() -> None:
    async def main() -> None:
        async with endpoint(*["Go on."] * 60) as served:
            settings = {"model": "any", "persona": "You are {role}.", "base_url": served.url, "opens": True}
            report = await check_interaction(SimulatedUser(settings), interaction_kwargs={"role": "Ada"})
            report.raise_if_failed()
            assert report.named("skipped") == ["asked the same again, it says the same"]

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


class JudgesInWords(Tutor):
    async def calculate_score(self, instance_id: str, **kwargs: Any) -> Any:
        return "good"


class NeedsWords(Tutor):
    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Any:
        assert messages[-1]["content"][0]
        return await super().generate_response(instance_id, messages, **kwargs)


class NoTools(Tutor):
    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Any:
        assert {message["role"] for message in messages} <= {"user", "assistant"}
        return await super().generate_response(instance_id, messages, **kwargs)


class Moody(Tutor):
    num_asked = 0

    async def generate_response(self, *args: Any, **kwargs: Any) -> Any:
        self.num_asked += 1
        is_over, content, score, extra = await super().generate_response(*args, **kwargs)
        return is_over, f"{content} ({self.num_asked})", score, extra


class Mixes(Tutor):
    """Keeps its state under one name for all."""

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


class Forgets(Tutor):
    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        pass


class InsistsOnStart(Tutor):
    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._scores[instance_id]


class Clings(Tutor):
    """Is not to be finalized while it answers, and thinks it still does."""

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
        time.sleep(0.11)  # noqa: ASYNC251  (the fault)
        return await super().generate_response(*args, **kwargs)


@pytest.mark.parametrize(
    ("faulty", "check"),
    [
        (BadReplay, "it says what becomes of its replies after a crash"),
        (Opener, "what it opens the conversation with is text"),
        (NeedsReplies, "a trajectory may end before it is asked anything"),
        (Terse, "a reply says whether it is over, what, how good the turn was, and what to record"),
        (RecordsObjects, "what a reply records can be written to a file"),
        (Appends, "the conversation it is given stays as it is"),
        (JudgesInWords, "the verdict is a number, or None"),
        (NeedsWords, "an answer without words is answered too"),
        (NoTools, "tools in the conversation do not disturb it"),
        (Moody, "asked the same again, it says the same"),
        (Mixes, "trajectories that run at once are told apart"),
        (Forgets, "a trajectory that is over leaves nothing behind"),
        (InsistsOnStart, "a trajectory whose start failed can be finalized"),
        (Clings, "a trajectory that is cancelled while it is answered can be finalized"),
        (Blocks, "others go on while it answers"),
    ],
)
def test_a_fault_is_found(faulty: type[Tutor], check: str) -> None:
    assert check in failures(faulty())


def test_every_check_has_a_fault_that_it_finds() -> None:
    from agent_loop.interactions.check.contract import CHECKS

    parametrized = next(mark for mark in test_a_fault_is_found.pytestmark if mark.name == "parametrize")
    assert {check for _, check in parametrized.args[1]} == set(CHECKS)


def test_a_check_that_hangs_has_failed_and_the_report_says_so() -> None:
    class Hangs(Tutor):
        async def generate_response(self, *args: Any, **kwargs: Any) -> Any:
            await asyncio.Event().wait()

    report = run_virtual(check_interaction(Hangs(), interaction_kwargs={"ground_truth": "42"}))
    assert "it took longer than 60 s" in [result.detail for result in report.failures]
    with pytest.raises(ContractError, match=r"interaction 'tutor': \d+ of 15 checks failed\n  a reply says"):
        report.raise_if_failed()


def test_the_suite_needs_something_that_the_model_says() -> None:
    with pytest.raises(ConfigError, match="at least one answer"):
        asyncio.run(check_interaction(Tutor(), answers=()))
