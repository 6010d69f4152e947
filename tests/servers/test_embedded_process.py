"""Tests of the embedded engine in its own process, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from agent_loop.checks import Reference, check_server
from agent_loop.config import ModelConfig
from agent_loop.errors import BadPrompt, ConfigError, SamplingParamsError, ServerDied, ServerTimeout
from agent_loop.servers.base import Ability, ServerSpec
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.embedded_process import EmbeddedProcess
from tests.servers.tiny_embedded import GREEDY, LONG, random_prompt, tiny_model

pytestmark = pytest.mark.slow

LENGTH = 256


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(initializer_range=0.06).save_pretrained(path)
    return path


async def test_the_process_scores_texts_as_the_engine_does(model_path: Path) -> None:
    text = random_prompt(30)
    reference = EmbeddedServer.from_pretrained(model_path, config=EmbeddedConfig(max_model_len=LENGTH))
    async with running(model_path) as server:
        assert Ability.SCORE in server.abilities
        scores = await server.score(text, start=10, top_logprobs=2)
        expected = await reference.score(text, start=10, top_logprobs=2)
        np.testing.assert_array_equal(scores.logprobs, expected.logprobs)
        np.testing.assert_array_equal(np.asarray(scores.top_ids), np.asarray(expected.top_ids))
        with pytest.raises(BadPrompt, match="the text to score has 257 tokens"):
            await server.score(random_prompt(LENGTH + 1))
    await reference.close()


def spec_of(model_path: Path, **changes: object) -> ServerSpec:
    return ServerSpec("engine", ModelConfig(path=str(model_path)), LENGTH, **changes)


@asynccontextmanager
async def running(model_path: Path, **engine_kwargs: object) -> AsyncIterator[EmbeddedProcess]:
    server = EmbeddedProcess(spec_of(model_path, engine_kwargs=engine_kwargs))
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def pid_of(server: EmbeddedProcess) -> int:
    pid = server._process.pid
    assert pid is not None
    return pid


async def test_the_server_passes_all_checks_of_the_server_interface(model_path: Path) -> None:
    server = EmbeddedProcess(spec_of(model_path))
    await server.start()
    report = await check_server(server, max_model_len=LENGTH, reference=Reference.load(model_path))
    report.raise_if_failed()
    assert report.named("skipped") == ["a completion under a schema ends where the text is complete"]


async def test_requests_complete_fail_are_cancelled_and_fail_when_the_engine_dies(model_path: Path) -> None:
    async with running(model_path, max_slots=1) as server:
        await check_refusal_and_cancellation(server)
        await check_loss(server)


async def check_refusal_and_cancellation(server: EmbeddedProcess) -> None:
    with pytest.raises(SamplingParamsError):
        await server.generate(random_prompt(9), structs.replace(GREEDY, temperature=1e-9), "a")
    task = asyncio.create_task(server.generate(random_prompt(9), LONG, "b"))
    await until_one_runs(server)
    task.cancel()
    output = await server.generate(random_prompt(9), GREEDY, "c")
    chunks = [chunk async for chunk in server.stream(random_prompt(9), GREEDY, "d")]
    assert [token for chunk in chunks for token in chunk.token_ids] == output.token_ids
    assert (await server.health()).num_running == 0


async def check_loss(server: EmbeddedProcess) -> None:
    pending = [
        asyncio.create_task(server.generate(random_prompt(9), LONG, f"long-{number}")) for number in range(20)
    ]
    streamed = asyncio.create_task(anext(server.stream(random_prompt(9), LONG, "streamed")))
    await until_one_runs(server)
    os.kill(pid_of(server), signal.SIGKILL)
    *_, last, part = await asyncio.gather(*pending, streamed, return_exceptions=True)
    for failed in (last, part):
        assert isinstance(failed, ServerDied)
        assert "exit code -9" in str(failed)
    health = await server.health()
    assert not health.is_alive
    assert "exit code -9" in health.detail
    with pytest.raises(ServerDied, match="start another server"):
        await server.generate(random_prompt(9), GREEDY, "d")
    await server.abort("a")
    server.end_session("a")


async def until_one_runs(server: EmbeddedProcess) -> None:
    async with asyncio.timeout(60):
        while (await server.health()).num_running == 0:  # noqa: ASYNC110  (another process starts it)
            await asyncio.sleep(0.001)


def test_a_failed_start_raises_the_reason_and_leaves_no_process(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_slot"):
        EmbeddedProcess(spec_of(model_path, engine_kwargs={"max_slot": 2}))

    async def start(spec: ServerSpec) -> None:
        server = EmbeddedProcess(spec)
        try:
            await server.start()
        finally:
            with pytest.raises(ProcessLookupError):
                os.kill(pid_of(server), 0)

    with pytest.raises(ConfigError, match="no model can be loaded"):
        asyncio.run(start(spec_of(tmp_path / "nothing")))
    with pytest.raises(ServerTimeout, match="start_timeout_s"):
        asyncio.run(start(spec_of(model_path, start_timeout_s=0.05)))


async def test_the_engine_ends_with_the_process_that_started_it(model_path: Path) -> None:
    program = f"""
        import asyncio, time
        from agent_loop.config import ModelConfig
        from agent_loop.servers.base import ServerSpec
        from agent_loop.servers.embedded_process import EmbeddedProcess

        async def main():
            server = EmbeddedProcess(ServerSpec("engine", ModelConfig(path={str(model_path)!r}), {LENGTH}))
            await server.start()
            print(server._process.pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    parent = subprocess.Popen(  # noqa: ASYNC220  (it starts at once)
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    engine = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()

    async with asyncio.timeout(60):
        while _is_running(engine):  # noqa: ASYNC110  (another process ends)
            await asyncio.sleep(0.05)


def _is_running(pid: int) -> bool:
    """Return whether a process runs. A zombie counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
