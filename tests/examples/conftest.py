from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agent_loop.config import Config, load_config
from agent_loop.tiny_models.tokenizer import train_tokenizer
from examples.common.demonstrations import Task
from examples.run import RECIPES, Recipe, conversations_of, tool_schemas

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
