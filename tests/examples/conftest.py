"""Examples as `examples.run` loads them, and runs of an example with its own configuration and a scripted model."""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import Config, load_config
from agent_loop.rewards.function import load_reward
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.tiny_models.tokenizer import train_tokenizer
from agent_loop.trajectory import Trajectory
from examples.common.demonstrations import Task
from examples.run import RECIPES, Recipe, conversations_of, tool_schemas
from tests.helpers import hermes_template, small_tokenizer

WITHOUT_CONTAINER = ("data.workspace.container=null", "data.workspace.folder=examples/shell_agent/workspace")
"""Settings with which the shell agent works in a folder, so that its tests need no container runtime."""
OVERRIDES = {"shell_agent": WITHOUT_CONTAINER}


@dataclass(frozen=True, slots=True)
class Example:
    """An example, loaded as `examples.run` loads it."""

    task: Task
    recipe: Recipe
    config: Config
    schemas: Sequence[dict[str, Any]]
    tokenizer: PreTrainedTokenizerFast


@pytest.fixture(
    scope="package", params=[name for name, recipe in RECIPES.items() if recipe.habit is not None]
)
def example(request: pytest.FixtureRequest) -> Example:
    name: str = request.param
    task = load_task(name)
    config = load_config(f"examples/{name}/config.yaml", overrides=OVERRIDES.get(name, ()))
    schemas = tool_schemas(task, config)
    conversations = conversations_of(task, RECIPES[name], rng=random.Random(0))
    tokenizer = train_tokenizer(islice(conversations, 500), tools=schemas)
    return Example(task, RECIPES[name], config, schemas, tokenizer)


def load_task(name: str) -> Any:
    """Import the task of an example."""
    return importlib.import_module(f"examples.{name}.task")


def run_scripted(
    example: Path | Config,
    rows: Sequence[Mapping[str, Any]],
    script: Callable[[ScriptedRequest], ScriptedReply],
    *,
    overrides: Sequence[str] = (),
    template: ChatTemplate | None = None,
) -> list[Trajectory]:
    """Run each row once with the configuration of an example or of its folder, and return the trajectories."""
    settings = ["rollout.engine=scripted", *overrides]
    config = (
        load_config(example / "config.yaml", overrides=settings) if isinstance(example, Path) else example
    )
    function = config.reward.function  # None if a tool gives the reward
    options: dict[str, Any] = {
        "servers": [ScriptedServer(script)],
        "template": template or hermes_template(),
        "reward": None if function is None else load_reward(function, timeout_s=5.0),
    }

    async def roll_out() -> list[Trajectory]:
        async with AgentLoopManager(config.rollout, **options) as manager:
            return await manager.run(rows, n=1)

    return asyncio.run(roll_out())


def context_of(request: ScriptedRequest) -> str:
    """Return the text of a request's prompt."""
    return small_tokenizer().decode(request.prompt_ids.tolist(), skip_special_tokens=False)
