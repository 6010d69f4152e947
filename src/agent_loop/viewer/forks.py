"""Forks of trajectories that the page starts: checks of the requests, and the process that runs a fork."""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from agent_loop.errors import AgentLoopError, ConfigError, DataError
from agent_loop.runtime.describe import one_line
from agent_loop.serve.middleware import LOCAL_HOSTS
from agent_loop.storage.run import StoredRun
from agent_loop.viewer.source import CONFIG_FILE, RunSource
from agent_loop.viewer.trajectory import trajectory_packet

RUN_ENGINE = "run"
"""Value of `--server` for the engine in the settings of the run."""
TOKEN_HEADER = "x-viewer-token"
MAX_BODY_BYTES = 1 << 20
MAX_MESSAGE = 600
NO_SERVER = (
    "Forks need a server. Start the viewer with `agent-loop view RUN --server URL`, the URL of a vLLM, SGLang or "
    "`agent-loop serve` server of the model, or with `--server run` for the engine in the settings of the run."
)


class Forks:
    """Runs one fork at a time, in a process of its own.

    Args:
        source: The run.
        server: URL of a server, `RUN_ENGINE`, or None if the page must not start work.
        host: Address at which the viewer listens.
    """

    def __init__(self, source: RunSource, *, server: str | None, host: str) -> None:
        self._source = source
        self._server = server
        self._lock = asyncio.Lock()
        self.token = secrets.token_urlsafe(24)
        """Secret that only the page knows. Pages of other sites can send requests, but cannot read it."""
        if server is None:
            return
        if server != RUN_ENGINE and not server.startswith(("http://", "https://")):
            raise ConfigError(
                f"--server is {server!r}; give the URL of a server, such as http://127.0.0.1:8000, or {RUN_ENGINE!r} "
                "for the engine in the settings of the run"
            )
        if host not in LOCAL_HOSTS:
            raise ConfigError(
                f"--server lets the page start work, and --host {host} lets others open it; leave one of them out"
            )
        if not self._config.is_file():
            raise DataError(
                f"--server needs the settings of the run, and there is no {str(self._config)!r}; view the run's folder"
            )

    @property
    def _config(self) -> Path:
        return self._source.folder / CONFIG_FILE

    async def state(self, request: Request) -> Response:
        """Return the token of the page and what continues a fork, or why there are no forks."""
        if self._server is None:
            return JSONResponse({"problem": NO_SERVER, "token": None, "server": ""})
        server = f"The model of {self._server} continues it."
        if self._server == RUN_ENGINE:
            server = "Each fork starts the engine of the run's settings, with the run's last checkpoint if it has one."
        return JSONResponse({"problem": "", "token": self.token, "server": server})

    async def fork(self, request: Request) -> Response:
        """Run a fork and return its trajectory as a packet."""
        self._check_origin(request)
        given = await _body(request)
        if self._lock.locked():
            raise HTTPException(409, "another fork is running; wait until it ends")
        async with self._lock:
            return Response(await self._run(given, request), media_type="application/octet-stream")

    def _check_origin(self, request: Request) -> None:
        """Refuse requests that pages of other sites may have caused."""
        if self._server is None:
            raise HTTPException(503, NO_SERVER)
        origin = request.headers.get("origin")
        is_own = origin is None or origin == f"{request.url.scheme}://{request.headers.get('host')}"
        token = request.headers.get(TOKEN_HEADER, "")
        if not is_own or not secrets.compare_digest(token.encode(), self.token.encode()):
            raise HTTPException(403, "only the page of this viewer may start a fork; reload the page")

    async def _run(self, given: ForkRequest, request: Request) -> bytes:
        file = self._source.files.file_of(given.split, given.step, given.id)
        if file is None:
            raise HTTPException(
                404, f"no trajectory {given.id[:80]} of {given.split[:80]} step {given.step} is stored"
            )
        with tempfile.TemporaryDirectory(prefix="agent-loop-fork-") as folder:
            out = Path(folder) / "fork.parquet"
            job = ForkJob(
                **msgspec.structs.asdict(given),
                file=str(file.path),
                config=str(self._config),
                server_url=None if self._server == RUN_ENGINE else self._server,
                out=str(out),
            )
            await _run_process(job, request)
            try:
                (row,) = StoredRun(out).rows()
            except (AgentLoopError, ValueError) as error:
                raise HTTPException(500, one_line(str(error), max_length=MAX_MESSAGE)) from error
            return trajectory_packet(row, self._source.pieces())


async def _run_process(job: ForkJob, request: Request) -> None:
    """Run a fork in a process, which is killed if the page is closed or the viewer stops."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "agent_loop.viewer.fork_process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_kill_if_unwanted(process, request))
            _, stderr = await process.communicate(msgspec.json.encode(job))
            watch.cancel()
    finally:
        _kill(process)
    if process.returncode:
        lines = stderr.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if lines else f"its process ended with {process.returncode}"
        raise HTTPException(422, one_line(reason, max_length=MAX_MESSAGE))


async def _kill_if_unwanted(process: asyncio.subprocess.Process, request: Request) -> None:
    stopping = cast(asyncio.Event, request.app.state.stopping)
    while not stopping.is_set() and not await request.is_disconnected():
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await stopping.wait()
    _kill(process)


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()


async def _body(request: Request) -> ForkRequest:
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "give JSON")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the text is too long; give at most {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=ForkRequest)
    except msgspec.DecodeError as error:
        raise HTTPException(400, one_line(str(error), max_length=MAX_MESSAGE)) from error


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fork that the page asks for."""

    split: str
    step: int
    id: str
    """Id of the trajectory."""
    turn: int
    """Turn of the model that gets the text; 1 is the first."""
    text: str
    """Text of the turn, with the control tokens of tool calls. The end of the turn may be left out."""


class ForkJob(ForkRequest, frozen=True, kw_only=True):
    """A fork to run."""

    file: str
    """Parquet file with the trajectory."""
    config: str
    """YAML file with the settings of the run."""
    server_url: str | None
    """Server of the model; None is the engine of the settings."""
    out: str
    """Parquet file to write the fork to."""
