"""The checks of tools and interactions pass those that follow the contract, and find each kind of fault."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agent_loop.checks import check_interaction, check_tool, instances
from agent_loop.checks.instances import TOOL_CHECKS, edge_arguments
from agent_loop.cli import app
from agent_loop.environments.gymnasium import GymnasiumInteraction
from agent_loop.errors import ConfigError, ToolError
from agent_loop.integrations.verl.gsm8k import Gsm8kInteraction, Gsm8kTool
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.scripted import ScriptedInteraction
from agent_loop.interactions.simulated_user import SimulatedUser
from agent_loop.testing.conformance import CheckReport
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.calculator import CalculatorTool
from agent_loop.tools.function import function_tool
from agent_loop.tools.search.tool import SearchTool
from tests.environments.test_gymnasium import FROZEN_LAKE
from tests.interactions.endpoint import endpoint

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
SCHEMA = {"type": "function", "function": {"name": "notes", "parameters": PARAMETERS}}
CALLS = [{"text": "a"}, {"text": "b"}, {"text": "c"}]


class Notes(BaseTool):
    """Tool that stores notes and counts them, without fault. Each subclass has one fault."""

    on_replay = "rerun"

    def __init__(self) -> None:
        super().__init__({}, SCHEMA)
        self.notes: dict[str, list[str]] = {}

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self.notes[instance_id] = []
        await asyncio.sleep(0.001)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return await self.answer(instance_id, parameters["text"])

    async def answer(self, instance_id: str, text: str) -> Any:
        await asyncio.sleep(0.001)
        if not text.strip():
            raise ToolError("there is nothing to note")
        notes = self.notes[instance_id]
        notes.append(text)
        return ToolResponse(text=f"{len(notes)} notes"), 0.5, {"length": len(notes)}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return float(len(self.notes[instance_id]))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.notes.pop(instance_id, None)


class NoSchema(Notes):
    def __init__(self) -> None:
        super().__init__()
        function = {"name": "notes", "parameters": {"type": "banana"}}
        self.tool_schema = {"type": "function", "function": function}


class ReturnsNumber(Notes):
    async def answer(self, instance_id: str, text: str) -> Any:
        return 7


class RefusesAll(Notes):
    async def answer(self, instance_id: str, text: str) -> Any:
        raise ToolError("closed today")


class RecordsObjects(Notes):
    async def answer(self, instance_id: str, text: str) -> Any:
        response, reward, extra = await super().answer(instance_id, text)
        return response, reward, {**extra, "tool": self}


class RewardsWithText(Notes):
    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return "well done"


class NeedsACallForItsReward(Notes):
    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return 1 / len(self.notes[instance_id])


class FailsOnUnusualText(Notes):
    async def answer(self, instance_id: str, text: str) -> Any:
        text.encode("ascii")
        return await super().answer(instance_id, text)


class SharesState(Notes):
    """Shares its state between trajectories."""

    def __init__(self) -> None:
        super().__init__()
        self.mine: list[str] = []

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self.mine = self.notes[instance_id] = []

    async def answer(self, instance_id: str, text: str) -> Any:
        self.mine.append(text)
        return ToolResponse(text=f"{len(self.mine)} notes"), None, {}


class OneAtATime(Notes):
    """Fails if two calls overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.is_busy = False

    async def answer(self, instance_id: str, text: str) -> Any:
        if self.is_busy:
            raise RuntimeError("busy")
        self.is_busy = True
        try:
            return await super().answer(instance_id, text)
        finally:
            self.is_busy = False


class DeclaresRecorded(Notes):
    on_replay = "recorded"


class DeclaresRerun(Notes):
    """Returns a different result each time."""

    num_calls = 0

    async def answer(self, instance_id: str, text: str) -> Any:
        self.num_calls += 1
        return ToolResponse(text=str(self.num_calls)), None, {}


class Blocks(Notes):
    async def answer(self, instance_id: str, text: str) -> Any:
        time.sleep(0.12)  # noqa: ASYNC251  (this is the fault)
        return ToolResponse(text="noted"), None, {}


class NeverReleases(Notes):
    async def release(self, instance_id: str, **kwargs: Any) -> None:
        pass


class LeavesTasks(Notes):
    def __init__(self) -> None:
        super().__init__()
        self.tasks: set[asyncio.Task[None]] = set()

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        await super().create(instance_id)
        self.tasks.add(asyncio.create_task(asyncio.sleep(60)))


class ReleasesOnlyWhatIsThere(Notes):
    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.notes[instance_id]


class ForgetsLateStarts(Notes):
    """A cancelled create leaves state that release does not remove."""

    def __init__(self) -> None:
        super().__init__()
        self.starting: set[str] = set()

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self.starting.add(instance_id)
        await super().create(instance_id)
        self.starting.discard(instance_id)


class KeepsItsLock(Notes):
    """A cancelled call never releases its semaphore."""

    def __init__(self) -> None:
        super().__init__()
        self.semaphore = asyncio.Semaphore()

    async def answer(self, instance_id: str, text: str) -> Any:
        await self.semaphore.acquire()
        await asyncio.sleep(0.01)
        self.semaphore.release()
        return await super().answer(instance_id, text)


class CannotBeCancelled(Notes):
    async def answer(self, instance_id: str, text: str) -> Any:
        over = time.monotonic() + 0.6
        while time.monotonic() < over:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(over - time.monotonic())
        return await super().answer(instance_id, text)


def checked(tool: BaseTool, **options: Any) -> CheckReport:
    async def main() -> CheckReport:
        return await check_tool(tool, **{"calls": CALLS, "timeout_s": 5, **options})

    return asyncio.run(main())


def test_a_tool_without_fault_passes() -> None:
    report = checked(Notes())
    report.raise_if_failed()
    assert report.named("passed") == list(TOOL_CHECKS.checks)


REPLIES = "every turn gets a valid reply"
CANCELLED = "a cancelled turn ends quickly and does not affect later trajectories"
LEFT = "a closed trajectory leaves nothing behind"


@pytest.mark.parametrize(
    ("faulty", "sentence", "reason"),
    [
        (NoSchema, "the schema is valid, and the calls match it", "not a valid JSON schema"),
        (ReturnsNumber, REPLIES, "return [(]ToolResp"),
        (RefusesAll, REPLIES, "every call failed"),
        (RecordsObjects, "the extra data of a reply can be stored", "cannot be stored: .*tool"),
        (RewardsWithText, "the score of a trajectory is a number or None", "finite number"),
        (NeedsACallForItsReward, "a trajectory may end before its first turn", "ZeroDivisionError"),
        (FailsOnUnusualText, "unusual turns get a reply", "UnicodeEncodeError"),
        (SharesState, "concurrent trajectories do not share state", "beside another trajectory"),
        (OneAtATime, "concurrent calls of one trajectory all get responses", "RuntimeError: busy"),
        (DeclaresRecorded, "repeated turns behave as on_replay declares", "recorded, but after other turns"),
        (DeclaresRerun, "repeated turns behave as on_replay declares", "rerun, but when the turns"),
        (Blocks, "it does not block the event loop", "the event loop was blocked"),
        (NeverReleases, LEFT, "its id is still in self.notes"),
        (LeavesTasks, LEFT, "leaks one task"),
        (ReleasesOnlyWhatIsThere, "a trajectory whose start failed can be closed", "KeyError"),
        (ForgetsLateStarts, "a trajectory whose start was cancelled can be closed", "still in self.starting"),
        (KeepsItsLock, CANCELLED, "took longer than"),
        (CannotBeCancelled, CANCELLED, "still ran 0.2 s after it was cancelled"),
    ],
)
def test_each_fault_is_found(
    faulty: type[Notes], sentence: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "END_S", 0.2)
    monkeypatch.setattr(instances, "TOOL_CHECKS", TOOL_CHECKS.only(sentence))
    (result,) = checked(faulty(), timeout_s=0.5 if issubclass(faulty, KeepsItsLock) else 5).results
    assert result.verdict == "failed"
    assert re.search(reason, result.detail), result.detail


def test_given_calls_must_match_the_schema() -> None:
    report = checked(Notes(), calls=[{"txt": "a"}])
    assert "has no argument 'txt'; did you mean 'text'?" in report.failures[0].detail
    with pytest.raises(ConfigError, match="at least one call"):
        checked(Notes(), calls=[])


@function_tool
def shout(text: str, times: int = 1) -> str:
    """Repeat a text in capitals."""
    return text.upper() * min(times, 3)


@pytest.mark.slow
def test_the_built_in_tools_follow_the_contract(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "Oak", "text": "A tree."}\n{"title": "Otter", "text": "A mammal."}\n')
    search = SearchTool({"corpus": [str(corpus)], "cache_dir": str(tmp_path)})
    checked(search, calls=[{"query_list": ["tree"]}, {"query_list": ["otter", "zebra"]}]).raise_if_failed()
    checked(CalculatorTool(), calls=[{"expression": "1 + 1"}, {"expression": "1 / 0"}]).raise_if_failed()
    answers = [{"answer": "41"}, {"answer": "#### 42"}]
    checked(Gsm8kTool({}), calls=answers, create_kwargs={"ground_truth": 42}).raise_if_failed()
    checked(shout, calls=[{"text": "a"}, {"text": "b", "times": 2}]).raise_if_failed()


def test_unusual_arguments_match_the_schema_and_differ_from_the_example() -> None:
    edges = edge_arguments(shout.tool_schema, {"text": "a", "times": 2})
    assert {"text": "a"} in edges
    assert {"text": "", "times": 2} in edges
    assert {"text": "a", "times": -1} in edges
    assert all(isinstance(edge["text"], str) for edge in edges)


# -- interactions ---

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


async def test_a_simulated_user_follows_the_contract() -> None:
    async with endpoint(*["Go on."] * 200) as served:
        settings = {"model": "any", "persona": "You are {role}.", "base_url": served.url, "opens": True}
        report = await check_interaction(SimulatedUser(settings), interaction_kwargs={"role": "Ada"})
        report.raise_if_failed()
        assert report.named("skipped") == ["repeated turns behave as on_replay declares"]


class Opener(Tutor):
    opens_conversation = True

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> Any:
        await super().start_interaction(instance_id, **kwargs)
        return 3


class Terse(Tutor):
    async def generate_response(self, *args: Any, **kwargs: Any) -> Any:
        return (await super().generate_response(*args, **kwargs))[:3]


@pytest.mark.parametrize("faulty", [Opener, Terse])
def test_a_fault_of_an_interaction_is_found(faulty: type[Tutor]) -> None:
    assert REPLIES in failures(faulty())


def test_the_checks_of_interactions_need_a_message_of_the_model() -> None:
    with pytest.raises(ConfigError, match="at least one answer"):
        asyncio.run(check_interaction(Tutor(), answers=()))


# -- the command -------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", "tool", *arguments])
    return result.exit_code, f"{result.output}{result.exception or ''}"


def test_the_command_checks_a_tool_by_its_name() -> None:
    code, output = run("calculator", "--call", '{"expression": "1+1"}')
    assert code == 0, output
    assert f"tool 'calculator': {len(list(TOOL_CHECKS.checks))} passed, 0 failed, 0 skipped" in output


def test_the_command_reads_a_config_and_sets_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(
        "from agent_loop.tools.base import BaseTool, ToolResponse\n"
        "class Faulty(BaseTool):\n"
        "    async def execute(self, instance_id, parameters, **kwargs):\n"
        "        return ToolResponse(text=self.config['text']), 'high', {}\n"
    )
    config = tmp_path / "tool.yaml"
    config.write_text(f"config: {{text: hello}}\ntool_schema: {json.dumps(SCHEMA)}\n")
    tool, call = f"{tmp_path}/faulty.py:Faulty", '{"text": "a"}'
    code, output = run(tool, "--config", str(config), "--call", call, "--json")
    assert code == 1
    assert "'high' (str) as its reward; return a finite number, or None" in output
    assert "has no schema; give tool_schema in the YAML" in run(tool, "--call", call)[1]
    assert "give a JSON object" in run("calculator", "--call", "[1]")[1]
