"""SGLang engines that are started for one test: whole runs, and starts that fail."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from agent_loop.errors import ConfigError, ServerDied, ServerTimeout
from tests.engines.common import (
    EngineCase,
    assert_is_token_exact,
    load_reference,
    make_model_folder,
    roll_out,
    train_three_steps,
)
from tests.engines.sglang_case import CASE, is_running

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang") / "warm"
    return make_model_folder(folder, is_tied=True, warm_start_steps=300)


def test_64_rows_of_the_tool_agent_are_token_exact(model_path: Path) -> None:
    trajectories = asyncio.run(roll_out(CASE, model_path))
    assert len(trajectories) == 64
    assert_is_token_exact(load_reference(model_path), trajectories)
    assert any(trajectory.output.num_turns > 2 for trajectory in trajectories)


def test_the_engine_has_the_weights_of_each_of_three_steps_of_grpo(model_path: Path, tmp_path: Path) -> None:
    asyncio.run(train_three_steps(CASE, model_path, folder=tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_runing_requests": 4}, "did you mean 'max_running_requests'"),
        ({"random_seed": 4}, r"set by rollout\.seed"),
    ],
)
def test_an_option_that_is_unknown_or_set_by_another_key_is_refused(
    model_path: Path, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineCase("sglang", options).server(model_path)


def test_a_model_that_cannot_be_loaded_fails_with_the_last_log_lines(tmp_path: Path) -> None:
    make_model_folder(tmp_path, is_tied=True)
    (tmp_path / "model.safetensors").unlink()
    server = CASE.server(tmp_path, model__device="cpu")
    with pytest.raises(ServerDied) as raised:
        asyncio.run(server.start())
    head, _, log = str(raised.value).partition("last log lines:\n")
    assert head.startswith("server sglang-0: the engine")
    assert "Cannot find any model weights" in log


def test_an_engine_that_takes_too_long_to_start_is_killed_and_its_log_is_shown(model_path: Path) -> None:
    server = CASE.server(model_path, model__device="cpu", rollout__start_timeout_s=8)
    began = time.monotonic()

    async def start_and_close() -> None:
        try:
            with pytest.raises(ServerTimeout, match=r"within 8 s(.|\n)*log lines"):
                await server.start()
        finally:
            await server.close()

    asyncio.run(start_and_close())
    assert time.monotonic() - began < 30
    pid = server._process.pid  # type: ignore[attr-defined]
    assert pid is not None
    assert not is_running(pid)
