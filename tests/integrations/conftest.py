from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agent_loop.config import Config, load_config
from examples.common.demonstrations import Habit
from examples.common.warm_start import make_warm_model
from examples.run import tool_schemas
from examples.two_hop_lookup import task

TASK_CONFIG = "examples/two_hop_lookup/config.yaml"
WARM_START_STEPS = 400
NUM_CONVERSATIONS = 1000
"""For the tokenizer."""


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo's model after a short warm start. The model knows the format, but gives up too often."""
    path = tmp_path_factory.mktemp("model")
    tools = tool_schemas(task, load_config(TASK_CONFIG))
    make_warm_model(
        path,
        task=task,
        tools=tools,
        habit=Habit(first_step_share=0.33),
        num_steps=WARM_START_STEPS,
        num_conversations=NUM_CONVERSATIONS,
    )
    return path


@pytest.fixture
def task_config(model_path: Path) -> Config:
    """Return the demo's configuration with that model."""
    return load_config(TASK_CONFIG, overrides=[f"model.path={model_path}"])


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch with one thread, because several are slower on machines with few cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
