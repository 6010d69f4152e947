"""vLLM engine and server for the tests: options, start and stop. For vLLM's CPU build."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from agent_loop.servers.base import AsyncServerBase
from tests.engines.common import MAX_MODEL_LEN, MAX_REQUESTS_AT_ONCE, EngineCase

VLLM = EngineCase(
    "vllm",
    {
        "enforce_eager": "true",
        "max_num_seqs": MAX_REQUESTS_AT_ONCE,
        "kv_cache_memory_bytes": 64 * 2**20,
        "block_size": 32,  # the minimum of the CPU build; its default is longer than the prompts here
    },
)
WORKER_EXTENSION = "agent_loop.servers.vllm.worker.WeightWorker"
START_TIMEOUT_S = 240.0


@contextmanager
def started(server: AsyncServerBase) -> Generator[asyncio.Runner]:
    """Start a server. Yield the runner of its event loop."""
    with asyncio.Runner() as runner:
        runner.run(server.start())
        try:
            yield runner
        finally:
            runner.run(server.close())


def kill_engine(leader: int | None) -> None:
    """Kill the processes of a group except its leader, as the kernel does when it is out of memory."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        fields = stat.read_text().rpartition(")")[2].split()
        pid, group = int(stat.parent.name), int(fields[2])
        if group == leader and pid != leader:
            os.kill(pid, signal.SIGKILL)


class ServerProcess:
    """Process group of `vllm serve`, started as a user starts it."""

    def __init__(self, model_path: Path, log: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        arguments = [
            *("--model", str(model_path), "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)),
            *("--enforce-eager", "--max-num-seqs", str(MAX_REQUESTS_AT_ONCE), "--block-size", "32"),
            *("--kv-cache-memory-bytes", str(64 * 2**20), "--host", "127.0.0.1", "--port", str(port)),
        ]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments, *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "startup complete" not in self._log.read_text(errors="replace"):
            assert self._process.poll() is None, self._log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, self._log.read_text(errors="replace")[-3000:]
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill all processes of the server."""
        os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        self._process.wait()
