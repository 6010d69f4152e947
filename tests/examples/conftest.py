from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerFast

from agent_loop.config import Config, load_config
from agent_loop.tools.base import BaseTool
from agent_loop.tools.registry import load_tools
from examples.common.demonstrations import Task, demonstrations
from examples.common.tokenizer import train_tokenizer
from examples.run import RECIPES, Recipe


@dataclass(frozen=True, slots=True)
class Example:
    """One example, loaded as the demo loads it."""

    task: Task
    recipe: Recipe
    config: Config
    tools: dict[str, BaseTool]
    tokenizer: PreTrainedTokenizerFast

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        return [tool.tool_schema for tool in self.tools.values()]


@pytest.fixture(scope="package", params=list(RECIPES))
def example(request: pytest.FixtureRequest) -> Example:
    name: str = request.param
    task = cast(Task, importlib.import_module(f"examples.{name}.task"))
    config = load_config(f"examples/{name}/config.yaml")
    tools = load_tools(config.rollout.multi_turn.tools)
    conversations = demonstrations(task, rng=random.Random(0), habit=RECIPES[name].habit)
    tokenizer = train_tokenizer(
        islice(conversations, 500), tools=[tool.tool_schema for tool in tools.values()]
    )
    return Example(task, RECIPES[name], config, tools, tokenizer)
