"""Errors of vLLM engines that do not start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_loop.errors import ConfigError, ServerDied, ServerTimeout
from tests.engines.common import make_model_folder
from tests.engines.vllm_cases import VLLM


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tied", is_tied=True)


def test_the_error_of_an_engine_that_fails_ends_with_its_last_log_lines(model_path: Path) -> None:
    server = VLLM.server(model_path, rollout__engine_kwargs__block_size=16)
    with pytest.raises(ServerDied, match="No common block size"):
        asyncio.run(server.start())


def test_an_engine_that_takes_too_long_to_start_is_killed(model_path: Path) -> None:
    server = VLLM.server(model_path, rollout__start_timeout_s=6)
    with pytest.raises(ServerTimeout, match=r"within 6 s(.|\n)*its last log lines"):
        asyncio.run(server.start())
    assert server._process.ended.is_set()


def test_an_option_that_vllm_does_not_have_is_refused_by_name(model_path: Path) -> None:
    server = VLLM.server(model_path, rollout__engine_kwargs__max_num_seq=8)
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        asyncio.run(server.start())
