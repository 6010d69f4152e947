"""Rows of verl's preprocessing, which hold interaction arguments even if only tools are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agent_loop.config import RolloutConfig
from agent_loop.errors import DataError
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import prepare_rows
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.helpers import hermes_template, text_reply, tool_call_reply

INTERACTIONS = "tests/compat/interactions.yaml"


def record(**interaction_kwargs: Any) -> dict[str, Any]:
    """Return a row of a GSM8K file. Everything but the prompt is in `extra_info`."""
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "42"}}},
            "interaction_kwargs": interaction_kwargs,
        },
    }


def run(
    rows: Sequence[dict[str, Any]],
    *,
    interactions: str | None,
    requests: list[ScriptedRequest] | None = None,
    **settings: Any,
) -> list[Trajectory]:
    def script(request: ScriptedRequest) -> ScriptedReply:
        if requests is not None:
            requests.append(request)
        return (
            tool_call_reply("calc_gsm8k_reward", answer="42") if request.turn == 0 else text_reply("#### 42")
        )

    multi_turn = {"tools": ["gsm8k"], "interaction_config_path": interactions}
    config = RolloutConfig.model_validate({"multi_turn": multi_turn, **settings})

    async def main() -> list[Trajectory]:
        servers = [ScriptedServer(script)]
        async with AgentLoopManager(config, servers=servers, template=hermes_template()) as manager:
            return await manager.run(prepare_rows(rows, prompt_key="prompt"), n=1)

    return run_virtual(main())


def test_interaction_arguments_without_a_name_are_ignored_if_no_interaction_is_configured() -> None:
    [trajectory] = run([record(query="What is 6 * 7?", ground_truth="42")], interactions=None)
    assert trajectory.output.failure is None
    assert trajectory.output.stop_reason is StopReason.ANSWERED
    assert trajectory.reward == 1.0


def test_interaction_arguments_without_a_name_are_reported_before_the_run_if_an_interaction_is_configured() -> (
    None
):
    requests: list[ScriptedRequest] = []
    rows = [record(name="patient", ground_truth="42"), record(query="What is 6 * 7?", ground_truth="42")]
    with pytest.raises(
        DataError, match=r"row 1: interaction_kwargs has no name, and the configured .* 'patient'"
    ):
        run(rows, interactions=INTERACTIONS, requests=requests)
    assert requests == []


def test_an_interaction_name_that_is_not_configured_is_rejected() -> None:
    with pytest.raises(DataError, match=r"row 0: interaction_kwargs\.name is 'gsm8k', but no interaction is"):
        run([record(name="gsm8k", ground_truth="42")], interactions=None)
