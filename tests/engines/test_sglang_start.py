"""Errors of SGLang engines that do not start."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from agent_loop.errors import ConfigError, ServerDied, ServerTimeout
from tests.engines.common import make_model_folder
from tests.engines.sglang_case import CASE, EngineCase, is_running

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("sglang") / "model", is_tied=True)


def test_an_unknown_option_is_refused_with_the_nearest_name(model_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_running_requests'"):
        EngineCase("sglang", {"max_runing_requests": 4}).server(model_path)


def test_an_option_that_another_key_sets_is_refused_with_that_key(model_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set by rollout\.seed"):
        EngineCase("sglang", {"random_seed": 4}).server(model_path)


def test_a_model_that_cannot_be_loaded_fails_with_the_last_log_lines(model_path: Path) -> None:
    (model_path / "model.safetensors").rename(model_path / "hidden")
    server = CASE.server(model_path, model__device="cpu")
    try:
        with pytest.raises(ServerDied) as raised:
            asyncio.run(server.start())
    finally:
        (model_path / "hidden").rename(model_path / "model.safetensors")
    head, _, log = str(raised.value).partition("last log lines:\n")
    assert head.startswith("server sglang-0: the engine")
    assert "Cannot find any model weights" in log


def test_an_engine_that_takes_too_long_to_start_is_killed_and_its_log_is_shown(model_path: Path) -> None:
    server = CASE.server(model_path, model__device="cpu", rollout__start_timeout_s=8)
    started = time.monotonic()

    async def start_and_close() -> str:
        try:
            with pytest.raises(ServerTimeout, match="within 8 s") as raised:
                await server.start()
        finally:
            await server.close()
        return str(raised.value)

    assert "log lines" in asyncio.run(start_and_close())
    assert time.monotonic() - started < 30
    pid = server._process.pid  # type: ignore[attr-defined]
    assert pid is not None
    assert not is_running(pid)
