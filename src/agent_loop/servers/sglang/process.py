"""Parent's handle of an engine in a child process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from itertools import count
from typing import IO, Any

from agent_loop.errors import BadServerReply, ConfigError, ServerDied, ServerError, ServerTimeout
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.sglang.frames import Frame, FrameProtocol

logger = logging.getLogger(__name__)

NUM_LOG_LINES = 30
"""Lines of the engine's log that errors quote."""
EXIT_TIMEOUT_S = 10.0
LOG_TIMEOUT_S = 3.0


class SGLangProcess:
    """Engine in a child process. Calls fail at once when the process dies.

    The child is the leader of a process group of its own. The whole group is killed when the engine ends, when `close`
    is called, and when this process ends.
    """

    def __init__(self, *, server: str) -> None:
        """Create the handle of a process that is not started.

        Args:
            server: Name of the server in errors.
        """
        self._server = server
        self._process: subprocess.Popen[bytes] | None = None
        self._protocol: FrameProtocol | None = None
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._inboxes: dict[int, asyncio.Queue[Frame | None]] = {}
        self._numbers = count(1)
        self._log: deque[str] = deque(maxlen=NUM_LOG_LINES)
        self._log_thread: threading.Thread | None = None
        self._kill: Callable[[], object] = _nothing
        self.death: str | None = None
        """Why the engine cannot be called any more; None while it can."""

    @property
    def pid(self) -> int | None:
        """Process id of the child, which is also the id of its process group."""
        return None if self._process is None else self._process.pid

    async def start(
        self, engine_kwargs: Mapping[str, Any], *, environment: Mapping[str, str], timeout_s: float
    ) -> dict[str, Any]:
        """Start the engine.

        Args:
            engine_kwargs: Fields of SGLang's `ServerArgs`.
            environment: Environment variables in addition to those of this process.

        Returns:
            The engine's `vocab_size`, `max_req_input_len` and `pids`.

        Raises:
            ConfigError: SGLang refuses the arguments.
            ServerTimeout: The start took longer than `timeout_s`.
            ServerDied: The process ended.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        ours = self._spawn(environment)
        _, self._protocol = await loop.create_unix_connection(
            lambda: FrameProtocol(on_frame=self._receive, on_end=self._after_disconnect), sock=ours
        )
        self._protocol.send(Frame("start", 0, dict(engine_kwargs)))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ready
        except TimeoutError:
            await self._kill_and_close(f"the engine did not start within {timeout_s:g} s")
            raise ServerTimeout(
                f"SGLang did not start within {timeout_s:g} s; raise rollout.start_timeout_s, or see its last log "
                f"lines:\n{self.log_tail()}",
                server=self._server,
            ) from None
        except BaseException:
            await self._kill_and_close("the engine did not start")
            raise

    async def call(
        self, path: str, body: Mapping[str, Any], *, request_id: str = "", timeout_s: float | None = None
    ) -> Any:
        """Send a call and return its reply. Cancelling this method cancels the call in the engine.

        Raises:
            ServerError: The engine replied with an error.
            ServerTimeout: The engine did not reply within `timeout_s`.
            ServerDied: The engine's process is gone.
        """
        scope = asyncio.timeout(timeout_s)
        try:
            async with scope, contextlib.aclosing(self._exchange("call", path, body, request_id)) as frames:
                async for frame in frames:
                    if frame.kind == "end":
                        return frame.value
        except TimeoutError:
            if not scope.expired():
                raise
            raise ServerTimeout(
                f"SGLang did not reply to {path} within {timeout_s or 0:g} s",
                server=self._server,
                request_id=request_id,
            ) from None
        raise BadServerReply(f"SGLang sent no reply to {path}", server=self._server, request_id=request_id)

    async def stream(
        self, path: str, body: Mapping[str, Any], *, request_id: str = ""
    ) -> AsyncGenerator[Any]:
        """Send a call and yield its replies. Closing the generator early cancels the call in the engine.

        Raises:
            ServerError: See `call`.
        """
        async with contextlib.aclosing(self._exchange("stream", path, body, request_id)) as frames:
            async for frame in frames:
                if frame.kind == "part":
                    yield frame.value

    async def close(self) -> None:
        """Kill the engine, and wait until its processes are gone. Open calls fail."""
        self._end("the server is closed")
        if self._process is not None:
            await run_in_thread(_wait_for_exit, self._process)
        if self._log_thread is not None:
            await run_in_thread(self._log_thread.join, EXIT_TIMEOUT_S)

    def log_tail(self) -> str:
        """Return the last lines of the engine's log."""
        return "\n".join(self._log) or "(it wrote nothing)"

    def died(self, request_id: str = "") -> ServerError:
        """Return the error of a request to the dead engine."""
        return ServerDied(self.death or "", server=self._server, request_id=request_id)

    async def _exchange(
        self, kind: Any, path: str, body: Mapping[str, Any], request_id: str
    ) -> AsyncGenerator[Frame]:
        if self.death is not None or self._protocol is None:
            self.death = self.death or "the engine was not started; call start first"
            raise self.died(request_id)
        number = next(self._numbers)
        inbox = self._inboxes[number] = asyncio.Queue()
        self._protocol.send(Frame(kind, number, (path, dict(body))))
        has_ended = False
        try:
            while not has_ended:
                frame = await inbox.get()
                has_ended = frame is None or frame.kind in ("end", "error")
                if frame is None:
                    raise self.died(request_id)
                if frame.kind == "error":
                    raise ServerError(str(frame.value), server=self._server, request_id=request_id)
                yield frame
        finally:
            del self._inboxes[number]
            if not has_ended:
                self._protocol.send(Frame("cancel", number, None))

    def _receive(self, frame: Frame) -> None:
        if frame.call in self._inboxes:
            self._inboxes[frame.call].put_nowait(frame)
        elif self._ready is None or self._ready.done():
            return
        elif frame.kind == "ready":
            self._ready.set_result(frame.value)
        elif frame.kind == "refused":
            self._ready.set_exception(ConfigError(f"SGLang refuses rollout.engine_kwargs: {frame.value}"))

    def _after_disconnect(self) -> None:
        """Kill the child, which closed the connection or died."""
        self._kill()
        if self._log_thread is not None:
            self._log_thread.join(LOG_TIMEOUT_S)  # the thread ends when the processes close their pipe
        self._end(f"SGLang's processes ended; their last log lines:\n{self.log_tail()}")

    async def _kill_and_close(self, reason: str) -> None:
        self._end(reason)
        await run_shielded(self.close, timeout_s=3 * EXIT_TIMEOUT_S)

    def _end(self, reason: str) -> None:
        if self.death is not None:
            return
        self.death = reason
        self._kill()
        if self._protocol is not None:
            self._protocol.close()
        for inbox in self._inboxes.values():
            inbox.put_nowait(None)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self.died())
            self._ready.exception()  # retrieved, so that asyncio does not log it if nobody waits

    def _spawn(self, environment: Mapping[str, str]) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agent_loop.servers.sglang.host", str(theirs.fileno())],
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # Kills only once, because the process id may be reused. Runs at the interpreter's exit at the latest.
        self._kill = weakref.finalize(self, _kill_group, self._process.pid)
        assert self._process.stdout is not None
        self._log_thread = threading.Thread(
            target=_follow, args=(self._process.stdout, self._log, self._server), daemon=True
        )
        self._log_thread.start()
        return ours


def _nothing() -> None:
    """Stub of `_kill` while there is no process."""


def _follow(stream: IO[bytes], log: deque[str], server: str) -> None:
    with stream:
        for line in stream:
            text = line.decode(errors="replace").rstrip()
            log.append(text)
            logger.info("%s: %s", server, text)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    """Wait until no process of the group is left."""
    process.wait(EXIT_TIMEOUT_S)
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.02)
