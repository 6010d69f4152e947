"""Interactions: their files, sessions, openings in resumed runs, and the examples of the documentation."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_loop.checks import check_interaction
from agent_loop.config import load_config
from agent_loop.environments.factory import load_environments
from agent_loop.environments.gymnasium import GymnasiumSettings
from agent_loop.environments.live import LiveEnvironment
from agent_loop.environments.trl import TrlEnvironment
from agent_loop.errors import ConfigError
from agent_loop.interactions.base import BaseInteraction, Reply
from agent_loop.interactions.registry import load_interactions
from agent_loop.interactions.scripted import ScriptedInteraction
from agent_loop.interactions.simulated_user import SimulatedUserSettings
from agent_loop.recording.record import RecordKind
from agent_loop.rewards.function import Score
from agent_loop.runtime.instances import OnReplay
from agent_loop.types import Message
from tests.helpers import text_reply, user
from tests.rollout.harness import WorkerHarness
from tests.rollout.journaled import cut_after, run_journaled
from tests.test_public_api import run_python

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


async def test_a_scripted_interaction_sends_its_replies_in_order_and_then_ends() -> None:
    interaction = ScriptedInteraction(["Again.", Reply("Right.", score=1.0, is_over=True)])

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


async def test_an_interaction_is_started_at_first_use_and_finalized_once() -> None:
    interaction = Examiner()
    session = session_of(interaction, name="examiner", truth="4")
    assert not session.is_open
    await session.reply(MESSAGES)
    await session.reply(MESSAGES)
    assert session.is_open
    assert await session.reward(MESSAGES) == Score(0.5)
    await session.close()
    await session.close()
    assert not session.is_open
    calls = [("start", {"truth": "4"}), *[("respond", {"truth": "4"})] * 2, ("score", {}), ("finalize", {})]
    assert interaction.log == calls
    assert len(MESSAGES) == 1  # although the interaction appended to its copies


INTERACTIONS = """
from agent_loop.interactions.base import BaseInteraction

class Tutor(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "", 0.0, {}

class Abstract(BaseInteraction):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "users.py").write_text(INTERACTIONS)
    return tmp_path


def load_yaml(folder: Path, text: str) -> list[str]:
    path = folder / "interactions.yaml"
    path.write_text(text.replace("FOLDER", str(folder)))
    return [
        f"{name}: {type(loaded).__name__} {loaded.config}" for name, loaded in load_interactions(path).items()
    ]


def test_each_entry_becomes_an_interaction_with_its_name_in_the_config(folder: Path) -> None:
    text = "interaction: [{name: tutor, class_name: 'FOLDER/users.py:Tutor', config: {level: 2}}]"
    assert load_yaml(folder, text) == ["tutor: Tutor {'level': 2, 'name': 'tutor'}"]


def test_an_interaction_without_a_name_is_named_after_its_class(folder: Path) -> None:
    text = "interaction: [{class_name: 'FOLDER/users.py:Tutor'}, {class_name: gsm8k}]"
    assert load_yaml(folder, text) == [
        "tutor: Tutor {'name': 'tutor'}",
        "gsm8k: Gsm8kInteraction {'name': 'gsm8k'}",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("interactions: []", "no list under 'interaction'"),
        ("interaction: [{name: a}]", "key 'class_name' is missing"),
        ("interaction: [{class_name: gsm8}]", "not a built-in interaction; did you mean 'gsm8k'"),
        (
            "interaction: [{class_name: gsm8k, config: {attempts: 3}}]",
            "constructing Gsm8kInteraction raised ConfigError: config of interaction 'gsm8k': unknown key 'attempts'",
        ),
        ("interaction: [{name: a, class_name: 'FOLDER/users.py:Tuto'}]", "did you mean 'Tutor'"),
        ("interaction: [{name: a, class_name: 'pathlib.Path'}]", "not a subclass of BaseInteraction"),
        (
            "interaction: [{name: a, class_name: 'FOLDER/users.py:Abstract'}]",
            "constructing Abstract raised TypeError",
        ),
        (
            "interaction: [{name: a, class_name: 'FOLDER/users.py:Tutor'}, {name: a, class_name: gsm8k}]",
            r"interaction\[1\]: there is another interaction named 'a'",
        ),
    ],
)
def test_an_invalid_file_raises_an_error_that_names_the_fault(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_yaml(folder, text)


def test_the_registry_imports_no_optional_dependency() -> None:
    loaded = run_python(
        """
        import sys
        import agent_loop.interactions.registry, agent_loop.loops, agent_loop.checks.instances
        print(sorted({"gymnasium", "openai", "torch", "transformers"} & set(sys.modules)))
        """
    )
    assert loaded == "[]"


ROWS = [{"raw_prompt": user("Begin."), "interaction_kwargs": {"name": "guide"}}]


class Guide(BaseInteraction):
    """Opens each conversation with a numbered message."""

    opens_conversation = True

    def __init__(self, *, on_replay: OnReplay, words: str) -> None:
        super().__init__({"name": "guide"})
        self.on_replay = on_replay
        self.words = words
        self.num_started = 0
        self.num_replies = 0

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str:
        self.num_started += 1
        return f"{self.words} {self.num_started}"

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Any:
        self.num_replies += 1
        return len(messages) > 4, f"{self.words}!", 0.5, {"turn": self.num_replies}


def make_harness(guide: Guide) -> WorkerHarness:
    return WorkerHarness(lambda request: text_reply(f"answer {request.turn}"), interactions={"guide": guide})


@pytest.mark.parametrize("on_replay", [OnReplay.RECORDED, OnReplay.RERUN, OnReplay.RESTART])
def test_a_resumed_conversation_keeps_its_opening_or_restarts(tmp_path: Path, on_replay: OnReplay) -> None:
    path = tmp_path / "journal"
    [whole] = run_journaled(path, make_harness(Guide(on_replay=on_replay, words="old")), ROWS)
    assert whole.output.messages[0]["content"] == "Begin.\n\nold 1"
    path.write_bytes(cut_after(path.read_bytes(), RecordKind.OBSERVATION))
    guide = Guide(on_replay=on_replay, words="new")
    [resumed] = run_journaled(path, make_harness(guide), ROWS, resume=True)
    opening, first_reply = (resumed.output.messages[index]["content"] for index in (0, 2))
    assert resumed.output.failure is None
    if on_replay is OnReplay.RESTART:
        assert (opening, first_reply) == ("Begin.\n\nnew 1", "new!")
    else:
        assert (opening, first_reply) == ("Begin.\n\nold 1", "old!")
        assert guide.num_started == 1
        assert guide.num_replies == (3 if on_replay is OnReplay.RERUN else 2)
    assert len(resumed.output.turn_scores) == len(whole.output.turn_scores)


PAGE = Path("docs/interactions.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def defined(name: str) -> Any:
    [code] = [code for code in blocks("python") if f"class {name}" in code]
    names: dict[str, Any] = {}
    exec(code, names)
    return names[name]


def test_the_customer_of_the_page_passes_check_interaction() -> None:
    customer = defined("Customer")({"name": "customer"})
    answers = ["No.", "I am sorry."]
    asyncio.run(check_interaction(customer, answers=answers)).raise_if_failed()


def test_the_settings_on_the_page_are_valid_for_the_built_in_interactions() -> None:
    entries = [entry for text in blocks("yaml") for entry in yaml.safe_load(text).get("interaction", [])]
    sections = {"gymnasium": GymnasiumSettings, "simulated_user": SimulatedUserSettings}
    read = [sections[e["class_name"]](**e["config"]) for e in entries if e["class_name"] in sections]
    assert len(read) == len(sections)


def test_the_shop_of_the_page_loads_from_its_configuration(tmp_path: Path) -> None:
    [code] = [code for code in blocks("python") if "class Shop" in code]
    (tmp_path / "shop.py").write_text(code)
    [settings] = [text for text in blocks("yaml") if "environments" in text]
    (tmp_path / "config.yaml").write_text(settings.replace("shop.py", f"{tmp_path}/shop.py"))
    multi_turn = load_config(tmp_path / "config.yaml").rollout.multi_turn
    assert multi_turn.has_tools
    shop = load_environments(multi_turn.environments)["shop"].make()
    assert isinstance(shop, TrlEnvironment)
    assert [tool.name for tool in shop.tools()] == ["buy"]
