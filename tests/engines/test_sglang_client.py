"""Client of a running SGLang server, which is a real server in another process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent_loop.errors import ConfigError
from agent_loop.servers.base import Ability
from agent_loop.servers.sglang import SGLangClient
from tests.engines.common import (
    MAX_MODEL_LEN,
    EngineCase,
    check_contract,
    make_model_folder,
)

pytestmark = pytest.mark.timeout(600)
START_TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("sglang") / "served", is_tied=True)


@pytest.fixture(scope="module")
def case(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
    """Server as a user starts it, with its tokenizer and cumulative streams."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.log"
    command = [sys.executable, "-m", "sglang.launch_server"]
    command += ["--model-path", str(model_path), "--port", str(port)]
    command += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
    command += ["--context-length", str(MAX_MODEL_LEN + 8), "--max-total-tokens", "16384"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, process, log)
        yield EngineCase("sglang", server_urls=(url,))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=30):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def test_a_server_with_too_short_a_context_or_another_model_is_refused(
    case: EngineCase, model_path: Path, tmp_path: Path
) -> None:
    spec = replace(case.spec(model_path), url=case.server_urls[0], max_model_len=1000)
    with pytest.raises(ConfigError, match="--context-length 1008"):
        asyncio.run(SGLangClient.create(spec).start())
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 10}')
    other = replace(case.spec(tmp_path), url=case.server_urls[0])
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        asyncio.run(SGLangClient.create(other).start())


def test_the_client_keeps_the_contract_of_servers(case: EngineCase, model_path: Path) -> None:
    client = SGLangClient.create(replace(case.spec(model_path), url=case.server_urls[0]))
    asyncio.run(check_contract(client, model_path))
    assert Ability.LOG_PROBS in client.abilities
