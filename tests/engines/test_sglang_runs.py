"""Whole runs on SGLang, with a configuration that differs from the embedded engine's only in the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_loop.trajectory import Trajectory
from tests.engines.common import (
    assert_is_token_exact,
    load_reference,
    make_model_folder,
    roll_out,
    train_three_steps,
)
from tests.engines.sglang_case import CASE

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang") / "warm"
    return make_model_folder(folder, is_tied=True, warm_start_steps=300)


def test_64_rows_of_the_tool_agent_are_token_exact(model_path: Path) -> None:
    trajectories: list[Trajectory] = asyncio.run(roll_out(CASE, model_path))
    assert len(trajectories) == 64
    assert_is_token_exact(load_reference(model_path), trajectories)
    assert any(output.num_turns > 2 for t in trajectories if (output := t.output) is not None)


def test_the_engine_has_the_weights_of_each_of_three_steps_of_grpo(model_path: Path, tmp_path: Path) -> None:
    manager = asyncio.run(train_three_steps(CASE, model_path, folder=tmp_path))
    assert manager.published[-1] == 3
    assert len(manager.differences) == len(manager.published) >= 3
