"""Client of a running vLLM server."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path

import pytest

from agent_loop.errors import BadPrompt, ConfigError
from agent_loop.servers.base import AsyncServerBase
from agent_loop.types import IntArray, SamplingParams
from tests.engines.common import MAX_MODEL_LEN, EngineCase, check_contract, make_model_folder, prompts
from tests.engines.vllm_cases import WORKER_EXTENSION, ServerProcess, started

LONG = SamplingParams(max_tokens=160, ignore_eos=True)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tied", is_tied=True)


@pytest.fixture(scope="module")
def process(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[ServerProcess]:
    process = ServerProcess(
        model_path,
        tmp_path_factory.mktemp("logs") / "vllm.log",
        *("--enable-scale-out", "--enable-prompt-tokens-details"),
        *("--worker-extension-cls", WORKER_EXTENSION),
    )
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


def client(process: ServerProcess, model_path: Path, **changes: object) -> AsyncServerBase:
    return EngineCase("vllm", server_urls=(process.url,)).server(model_path, **changes)


def test_the_client_keeps_the_contract_of_servers(process: ServerProcess, model_path: Path) -> None:
    asyncio.run(check_contract(client(process, model_path), model_path))


def test_the_limits_of_the_server_are_named(process: ServerProcess, model_path: Path) -> None:
    server = client(process, model_path)
    with started(server) as runner:
        with pytest.raises(BadPrompt, match=f"has {MAX_MODEL_LEN} tokens, but the server takes"):
            runner.run(server.score(prompts(1, length=MAX_MODEL_LEN)[0]))
        with pytest.raises(BadPrompt, match="start it with --max-logprobs 30"):
            runner.run(server.score(prompts(1)[0], top_logprobs=30))
    other = client(process, model_path, rollout__top_logprobs=25)
    with pytest.raises(ConfigError, match=r"does not return 26 log-probs .* start it with --max-logprobs 26"):
        asyncio.run(other.start())


def test_health_reports_the_load_of_the_server(process: ServerProcess, model_path: Path) -> None:
    server = client(process, model_path)

    async def keep_generating(prompt: IntArray, name: str) -> None:
        while True:
            await server.generate(prompt, LONG, name)

    async def main() -> None:
        tasks = [
            asyncio.ensure_future(keep_generating(prompt, f"full-{number}"))
            for number, prompt in enumerate(prompts(100, seed=3))
        ]
        try:
            while not (health := await server.health()).num_waiting:
                assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        assert 0 < (health.kv_cache_share or 0) <= 1
        assert 0 < health.num_running <= 100 - health.num_waiting  # some may not have reached the server

    with started(server) as runner:
        runner.run(main())
