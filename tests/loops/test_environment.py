"""Environments: classes as written for TRL, and every method of the base class."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import MultiTurnConfig
from agent_loop.environments.base import Environment, EnvironmentTool, Reply
from agent_loop.environments.factory import EnvironmentFactory, load_environments
from agent_loop.environments.trl import TrlClass, with_observation
from agent_loop.errors import ConfigError
from agent_loop.trajectory import IncidentKind, Trajectory
from agent_loop.types import Message, StopReason
from tests.helpers import call_text, roles, text_reply, tool_call_reply
from tests.rollout.harness import Adder, WorkerHarness, error_of, kinds, replies


class Shop:
    """Shop written for TRL's `environment_factory`, as TRL's documentation shows."""

    made: list[Shop]
    stock = 2

    def __init__(self) -> None:
        self.log: list[str] = []
        self.threads: set[int] = set()
        Shop.made.append(self)

    def reset(self, budget: int = 10, **kwargs: Any) -> str | None:
        self.threads.add(threading.get_ident())
        self.row = kwargs
        self.budget = budget
        return f" You have {budget} coins."

    def buy(self, price: int, what: str = "tea") -> str:
        """Buy something.

        Args:
            price: In coins.
            what: Which thing.

        Returns:
            What happened.
        """
        self.threads.add(threading.get_ident())
        if price > self.budget:
            raise ValueError(f"{what} is too dear.")
        self.budget -= price
        self.log.append(what)
        return f"Bought {what}."

    async def look(self) -> dict[str, int]:
        """Look into the purse."""
        return {"coins": self.budget}

    def _secret(self) -> None:
        raise AssertionError

    def get_reward(self) -> float:
        return float(len(self.log))


class Closing(Shop):
    def close(self) -> None:
        self.log.append("closed")


@pytest.fixture(autouse=True)
def no_shops() -> None:
    Shop.made = []


def play(make: Callable[[], Any], answers: Sequence[Any], *, row: Any = None, **options: Any) -> Trajectory:
    environments = {"shop": EnvironmentFactory.of(make, where="shop")}
    harness = WorkerHarness(answers, environments=environments, agent="environment_agent", **options)
    Shop.made.clear()
    return harness.run_one(**(row or {}))


def test_an_environment_class_written_for_trl_works_unchanged() -> None:
    script = [tool_call_reply("buy", price=3), tool_call_reply("look"), text_reply("Done.")]
    trajectory = play(Shop, script, row={"budget": 5, "prompt": "x", "id": 7})
    assert trajectory.output.messages[0]["content"] == "What is 1 + 2? You have 5 coins."
    assert replies(trajectory) == ["Bought tea.", "{'coins': 2}"]
    assert trajectory.output.stop_reason is StopReason.ANSWERED
    assert trajectory.reward == 1.0
    [shop] = Shop.made
    assert shop.row == {"prompt": "x", "id": 7}
    assert len(shop.threads) == 1
    assert threading.get_ident() not in shop.threads


def test_the_models_tools_are_the_public_methods() -> None:
    tools = {tool.name: tool for tool in TrlClass(Closing, Closing(), where="shop").tools}
    assert sorted(tools) == ["buy", "look"]
    buy = tools["buy"].schema["function"]
    assert buy["description"] == "Buy something."
    assert buy["parameters"]["required"] == ["price"]
    what = {"type": "string", "description": "Which thing.", "default": "tea"}
    assert buy["parameters"]["properties"]["what"] == what


def test_an_exception_of_a_method_is_reported_to_the_model() -> None:
    trajectory = play(Shop, [tool_call_reply("buy", price=99), text_reply("Too bad.")])
    assert replies(trajectory) == ["ValueError: tea is too dear."]
    assert kinds(trajectory) == [IncidentKind.TOOL_ERROR]
    assert trajectory.reward == 0.0


def test_calls_of_one_turn_run_one_after_the_other() -> None:
    class Counter(Shop):
        num_running = 0

        async def look(self) -> dict[str, int]:
            """Look."""
            self.num_running += 1
            await asyncio.sleep(1)
            found, self.num_running = self.num_running, self.num_running - 1
            return {"at once": found}

    script = [text_reply(call_text("look") * 2), text_reply("Done.")]
    trajectory = play(Counter, script, multi_turn=MultiTurnConfig(max_parallel_calls=2))
    assert replies(trajectory) == ["{'at once': 1}"] * 2


def test_the_reward_is_read_if_a_limit_ends_the_trajectory() -> None:
    trajectory = play(Shop, [tool_call_reply("buy", price=1)] * 2, max_assistant_turns=2)
    assert trajectory.output.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert trajectory.reward == 1.0


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"reset": lambda self, **row: 3}, "EnvironmentBug: reset of shop returned 3 (int); return a str"),
        ({"reset": lambda self, **row: 1 / 0}, "EnvironmentBug: reset of shop raised ZeroDivisionError"),
        ({"get_reward": lambda self: "good"}, "reward of shop returned 'good' (str)"),
        ({"get_reward": lambda self: 1 / 0}, "reward of shop raised ZeroDivisionError"),
        ({"get_reward": lambda self: float("nan")}, "reward of shop returned nan"),
    ],
)
def test_an_environment_that_raises_fails_its_trajectory(broken: dict[str, Any], message: str) -> None:
    assert message in error_of(play(type("Broken", (Closing,), broken), [text_reply("Hello.")]))
    assert Shop.made[0].log == ["closed"]


def test_a_method_that_hangs_times_out_and_blocks_nothing() -> None:
    release = threading.Event()

    class Stuck(Shop):
        def look(self) -> str:  # type: ignore[override]
            """Look."""
            release.wait(20)
            return "late"

    limits = MultiTurnConfig(tool_timeout_s=0.2, close_timeout_s=0.2)
    trajectory = play(Stuck, [tool_call_reply("look"), text_reply("Never mind.")], multi_turn=limits)
    release.set()
    assert replies(trajectory) == ["look took longer than 0.2 s and was stopped"]
    assert "reward of shop took longer than 0.2 s" in error_of(trajectory)


def test_rows_select_one_of_several_environments() -> None:
    environments = {name: EnvironmentFactory.of(Shop, where=name) for name in ("shop", "stall")}
    harness = WorkerHarness([text_reply("Hello.")], environments=environments, agent="environment_agent")
    assert harness.run_one(environment="stall").reward == 0.0
    for named, message in (
        ("stal", "environment is 'stal': no such environment; did you mean 'stall'?"),
        (None, "environment is None: no such environment; there are: shop, stall"),
    ):
        assert message in error_of(harness.run_one(environment=named))


def test_a_tool_of_the_same_name_is_refused() -> None:
    trajectory = play(Shop, [text_reply("Hello.")], tools=[Adder(name="buy")])
    assert "shop has a tool 'buy', and another tool has that name" in error_of(trajectory)


def test_an_observation_is_appended_to_the_last_message() -> None:
    prompt = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert with_observation(prompt, "c")[-1] == {"role": "user", "content": "bc"}
    assert with_observation(prompt, None) == prompt
    image = [{"type": "image", "image": "x"}]
    assert with_observation(prompt, image)[-1]["content"] == [{"type": "text", "text": "b"}, *image]
    assert prompt[-1]["content"] == "b"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("Endless", "Endless has no method reset"),
        ("Undocumented", "go has no docstring"),
        ("no_such", "has no 'no_such'"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(tmp_path: Path, reference: str, message: str) -> None:
    undocumented = "class Undocumented:\n    def reset(self, **row): ...\n    def go(self): ...\n"
    (tmp_path / "task.py").write_text(f"class Endless: ...\n{undocumented}")
    with pytest.raises(ConfigError, match=message):
        load_environments({"x": f"{tmp_path}/task.py:{reference}"})


class Vault(Environment):
    """Environment that uses every method of its base class."""

    opened: list[Vault]

    def __init__(self) -> None:
        self.calls: list[str] = []
        Vault.opened.append(self)

    def reset(self, row: Any) -> list[Message]:
        return [{"role": "system", "content": "Open the vault."}, {"role": "user", "content": row["hint"]}]

    def tools(self) -> list[EnvironmentTool]:
        parameters = {"type": "object", "properties": {"digit": {"type": "integer"}}, "required": ["digit"]}
        functions = [
            {"name": name, "description": name, "parameters": parameters} for name in ("turn", "force")
        ]
        return [
            EnvironmentTool({"type": "function", "function": function}, is_shown=function["name"] != "force")
            for function in functions
        ]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:

        self.calls.append(f"{name} {arguments['digit']}")
        return "click"

    def reply(self, messages: Any) -> Reply:

        return Reply("Go on.", score=0.25, is_over=len(self.calls) > 1)

    def reward(self, messages: Any) -> dict[str, Any]:

        return {"reward": len(self.calls) / 2, "num_messages": len(messages)}

    def close(self) -> None:
        self.calls.append("closed")


def test_tools_replies_and_reward_share_one_environment() -> None:
    Vault.opened = []
    environments = {"vault": EnvironmentFactory.of(Vault, where="vault")}
    script = [
        tool_call_reply("turn", digit=4),
        text_reply("Done?"),
        tool_call_reply("force", digit=2),
        text_reply("Done."),
    ]
    harness = WorkerHarness(script, environments=environments, agent="environment_agent")
    Vault.opened.clear()
    trajectory = harness.run_one(hint="It is 42.")
    output = trajectory.output
    assert roles(output.messages) == [
        *("system", "user", "assistant", "tool", "assistant", "user"),
        *("assistant", "tool", "assistant", "user"),
    ]
    assert output.stop_reason is StopReason.INTERACTION_FINISHED
    assert (trajectory.reward, output.extra_fields["num_messages"]) == (1.0, 10)
    assert list(output.turn_scores) == [0.25, 0.25]
    [vault] = Vault.opened
    assert vault.calls == ["turn 4", "force 2", "closed"]
    assert [schema["function"]["name"] for schema in output.tool_schemas] == ["turn"]
