"""Rollouts for TRL on a scripted server, and a fake trainer with the attributes that `rollout_func` reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from agent_loop.config import Config
from agent_loop.integrations.trl import AgentLoopRollouts
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.tools.function import function_tool
from agent_loop.trajectory import AgentLoopOutput
from tests.helpers import hermes_template, small_tokenizer, text_reply

CONFIG = Config.model_validate(
    {
        "rollout": {
            "engine": "scripted",
            "prompt_length": 512,
            "response_length": 96,
            "agent": {"default_agent_loop": "tool_agent"},
            "multi_turn": {"tools": [f"{__name__}:shelf_of"]},
        }
    }
)


@function_tool
def shelf_of(part: int) -> str:
    """Look up the shelf of a part.

    Args:
        part: The part.
    """
    return f"shelf {part + 1}"


def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> float:
    """Return the reward of the row; some rows raise an error."""
    if row.get("is_broken"):
        raise ValueError("this row has no right answer")
    return float(row.get("worth", 0.0))


def says_hello(request: ScriptedRequest) -> ScriptedReply:
    return text_reply("hello")


def rollouts_with(
    script: Callable[[ScriptedRequest], ScriptedReply] = says_hello,
    config: Config = CONFIG,
    *,
    has_reward: bool = True,
) -> tuple[AgentLoopRollouts, ScriptedServer]:
    """Return rollouts that are not yet open, and their server."""
    server = ScriptedServer(script)
    manager = AgentLoopManager(
        config.rollout,
        servers=[server],
        template=hermes_template(),
        reward=RewardFunction(reward, timeout_s=5.0) if has_reward else None,
    )
    return AgentLoopRollouts(config, manager=manager), server


def fake_trainer(*, step: int = 0, is_training: bool = True, **changes: Any) -> Any:
    """Return a fake `GRPOTrainer` for `rollout_func`. Keys of `changes` with a dot change its arguments."""
    model = torch.nn.Linear(2, 2).train(is_training)
    args = {"use_vllm": False, "temperature": 1.0, "max_completion_length": 96}
    trainer = {
        "tools": [],
        "environment_factories": None,
        "args": SimpleNamespace(**args | changes.pop("args", {})),
        "model": model,
        "accelerator": SimpleNamespace(num_processes=1, unwrap_model=lambda wrapped: wrapped),
        "state": SimpleNamespace(global_step=step),
    }
    return SimpleNamespace(**trainer | changes)


def text_of(token_ids: list[int]) -> str:
    return str(small_tokenizer().decode(token_ids))
