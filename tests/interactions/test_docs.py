"""Tests that run the examples of docs/interactions.md."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import yaml

from agent_loop.checks import check_interaction
from agent_loop.config import load_config
from agent_loop.environments.factory import load_environments
from agent_loop.environments.gymnasium import GymnasiumSettings
from agent_loop.environments.trl import TrlEnvironment
from agent_loop.interactions.simulated_user import SimulatedUserSettings

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
