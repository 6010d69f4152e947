"""Whole runs on vLLM, with a configuration that differs from the embedded engine's only in the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_loop.types import StopReason
from tests.engines.common import (
    assert_is_token_exact,
    load_reference,
    make_model_folder,
    roll_out,
    train_three_steps,
)
from tests.engines.vllm_cases import VLLM


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model that calls the example's tools. Its output head is tied to its embedding."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "warm", is_tied=True, warm_start_steps=300)


def test_64_rows_of_the_tool_agent_are_token_exact(model_path: Path) -> None:
    trajectories = asyncio.run(roll_out(VLLM, model_path))
    outputs = [trajectory.output for trajectory in trajectories]
    assert len(outputs) == 64
    assert not [output for output in outputs if output.stop_reason == StopReason.FAILED]
    assert any(output.num_turns > 2 for output in outputs), "no tool was called"
    worst = assert_is_token_exact(load_reference(model_path), trajectories)
    print(f"largest difference of a log-prob: {worst:.1e}")


def test_the_engine_has_the_weights_of_each_of_three_steps_of_grpo(model_path: Path, tmp_path: Path) -> None:
    manager = asyncio.run(train_three_steps(VLLM, model_path, folder=tmp_path))
    assert manager.published == [1, 2, 3]
    print(f"largest differences after each step: {manager.differences}")
