"""The agent loop of rows that name none."""

from __future__ import annotations

from typing import Any

import pytest

from agent_loop.config import RolloutConfig


@pytest.mark.parametrize(
    ("multi_turn", "expected"),
    [
        ({}, "single_turn_agent"),
        ({"tools": ["task.py:lookup"]}, "tool_agent"),
        ({"tool_config_path": "tools.yaml"}, "tool_agent"),
        ({"interaction_config_path": "interactions.yaml"}, "tool_agent"),
    ],
    ids=["neither", "tools", "file-of-tools", "interaction"],
)
def test_a_run_with_tools_or_an_interaction_uses_the_tool_agent(
    multi_turn: dict[str, Any], expected: str
) -> None:
    assert RolloutConfig.model_validate({"multi_turn": multi_turn}).default_agent_loop == expected


def test_the_loop_that_a_config_names_is_used_with_tools_too() -> None:
    config = RolloutConfig.model_validate(
        {"agent": {"default_agent_loop": "single_turn_agent"}, "multi_turn": {"tools": ["task.py:lookup"]}}
    )
    assert config.default_agent_loop == "single_turn_agent"
