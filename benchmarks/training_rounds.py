"""Helpers of the training benchmarks: the model of the two-hop look-up, and rounds in new processes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))  # the folder of examples/

from agent_loop.config import load_config
from examples.common.demonstrations import Habit
from examples.common.warm_start import make_warm_model
from examples.run import tool_schemas
from examples.two_hop_lookup import task

EXAMPLES = Path(__file__).parents[1] / "examples"
TASK_CONFIG = EXAMPLES / "two_hop_lookup" / "config.yaml"
MeasuredT = TypeVar("MeasuredT")


def make_task_model(path: Path, *, num_steps: int) -> None:
    """Create a model that calls both tools most of the time, as a model does for most of a training."""
    tools = tool_schemas(task, load_config(TASK_CONFIG))
    make_warm_model(path, task=task, tools=tools, habit=Habit(first_step_share=0.9), num_steps=num_steps)


def run_in_new_process(run: Callable[..., MeasuredT], *arguments: Any, **options: Any) -> MeasuredT:
    """Return the result of `run` in a new process, without threads or objects of earlier rounds."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=silence_libraries) as process:
        return process.submit(run, *arguments, **options).result()


def silence_libraries() -> None:
    """Use one torch thread, and disable warnings and progress bars."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
