"""SGLang engine for the tests: options, start and close."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_loop.servers.sglang import SGLangServer
from tests.engines.common import MAX_REQUESTS_AT_ONCE, EngineCase

ENGINE_KWARGS = {
    "attention_backend": "torch_native",
    "max_total_tokens": 16384,
    "max_running_requests": MAX_REQUESTS_AT_ONCE,
}
"""The only attention backend that runs on any CPU, and little memory, for a tiny model."""
CASE = EngineCase("sglang", ENGINE_KWARGS)


@contextmanager
def started(model_path: Path, **changes: object) -> Iterator[tuple[SGLangServer, asyncio.Runner]]:
    """Start an engine. Yield the engine and the runner of its event loop."""
    server = CASE.server(model_path, **changes)
    assert isinstance(server, SGLangServer)
    with asyncio.Runner() as runner:
        try:
            runner.run(server.start())
            yield server, runner
        finally:
            runner.run(server.close())


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def scheduler_of(leader: int | None) -> int:
    """Return the id of the scheduler in the process group of an engine."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        pid, group = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[2])
        if group == leader and b"scheduler" in (stat.parent / "cmdline").read_bytes():
            return pid
    raise AssertionError("there is no scheduler")
