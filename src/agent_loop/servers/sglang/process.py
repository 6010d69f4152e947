"""An engine in a process of its own, as the process of its server sees it."""

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
from agent_loop.servers.sglang.wire import Frame, FrameProtocol

logger = logging.getLogger(__name__)

NUM_LOG_LINES = 30
"""Of the engine's log, in errors."""
EXIT_TIMEOUT_S = 10.0
LOG_TIMEOUT_S = 3.0


class EngineProcess:
    """Calls an engine that runs in a child process, and notices at once when it is gone.

    Whatever happens to the engine stays there: the child leads a session of its own, which is killed as a whole when
    the engine ends, when `close` is called, and when this process ends.
    """

    def __init__(self, *, server: str) -> None:
        """Args: server: Names the server in errors."""
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
        """Why it answers nothing any more."""

    @property
    def pid(self) -> int | None:
        """Of the child, which leads a process group."""
        return None if self._process is None else self._process.pid

    async def start(
        self, engine_kwargs: Mapping[str, Any], *, environment: Mapping[str, str], timeout_s: float
    ) -> dict[str, Any]:
        """Brings the engine up.

        Args:
            engine_kwargs: Fields of SGLang's `ServerArgs`.
            environment: Beside that of this process.

        Returns:
            What `host` says of the engine.

        Raises:
            ConfigError: SGLang refuses the arguments.
            ServerTimeout: It took longer than `timeout_s`.
            ServerDied: The process ended.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        ours = self._spawn(environment)
        _, self._protocol = await loop.create_unix_connection(
            lambda: FrameProtocol(on_frame=self._take, on_end=self._lose), sock=ours
        )
        self._protocol.send(Frame("start", 0, dict(engine_kwargs)))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ready
        except TimeoutError:
            await self._give_up(f"the engine did not come up within {timeout_s:g} s")
            raise ServerTimeout(
                f"SGLang did not come up within {timeout_s:g} s; raise rollout.start_timeout_s, or see its last log "
                f"lines:\n{self.log_tail()}",
                server=self._server,
            ) from None
        except BaseException:
            await self._give_up("the engine did not come up")
            raise

    async def call(
        self, path: str, body: Mapping[str, Any], *, request_id: str = "", timeout_s: float | None = None
    ) -> Any:
        """One question, one answer. Cancelling withdraws the question.

        Raises:
            ServerError: The engine answered with an error.
            ServerTimeout: It did not answer within `timeout_s`.
            ServerDied: It is gone.
        """
        scope = asyncio.timeout(timeout_s)
        try:
            async with scope, contextlib.aclosing(self._converse("call", path, body, request_id)) as frames:
                async for frame in frames:
                    if frame.kind == "end":
                        return frame.value
        except TimeoutError:
            if not scope.expired():
                raise
            raise ServerTimeout(
                f"SGLang did not answer {path} within {timeout_s or 0:g} s",
                server=self._server,
                request_id=request_id,
            ) from None
        raise BadServerReply(f"no answer to {path}", server=self._server, request_id=request_id)

    async def stream(
        self, path: str, body: Mapping[str, Any], *, request_id: str = ""
    ) -> AsyncGenerator[Any]:
        """One question, many answers. Leaving early withdraws the question. Raises: As `call`."""
        async with contextlib.aclosing(self._converse("stream", path, body, request_id)) as frames:
            async for frame in frames:
                if frame.kind == "part":
                    yield frame.value

    async def close(self) -> None:
        """Ends the engine, and returns when its processes are gone. What still waits fails."""
        self._end("the server is closed")
        if self._process is not None:
            await run_in_thread(_wait_for_exit, self._process)
        if self._log_thread is not None:
            await run_in_thread(self._log_thread.join, EXIT_TIMEOUT_S)

    def log_tail(self) -> str:
        """The last lines that the engine wrote."""
        return "\n".join(self._log) or "(it wrote nothing)"

    def died(self, request_id: str = "") -> ServerError:
        """What happened, as an error of one request."""
        return ServerDied(self.death or "", server=self._server, request_id=request_id)

    async def _converse(
        self, kind: Any, path: str, body: Mapping[str, Any], request_id: str
    ) -> AsyncGenerator[Frame]:
        if self.death is not None or self._protocol is None:
            self.death = self.death or "the engine was not started; call start first"
            raise self.died(request_id)
        number = next(self._numbers)
        inbox = self._inboxes[number] = asyncio.Queue()
        self._protocol.send(Frame(kind, number, (path, dict(body))))
        is_answered = False
        try:
            while not is_answered:
                frame = await inbox.get()
                is_answered = frame is None or frame.kind in ("end", "error")
                if frame is None:
                    raise self.died(request_id)
                if frame.kind == "error":
                    raise ServerError(str(frame.value), server=self._server, request_id=request_id)
                yield frame
        finally:
            del self._inboxes[number]
            if not is_answered:
                self._protocol.send(Frame("cancel", number, None))

    def _take(self, frame: Frame) -> None:
        if frame.call in self._inboxes:
            self._inboxes[frame.call].put_nowait(frame)
        elif self._ready is None or self._ready.done():
            return
        elif frame.kind == "ready":
            self._ready.set_result(frame.value)
        elif frame.kind == "refused":
            self._ready.set_exception(ConfigError(f"SGLang refuses rollout.engine_kwargs: {frame.value}"))

    def _lose(self) -> None:
        """The child hung up, on purpose or because it is dead."""
        self._kill()
        if self._log_thread is not None:
            self._log_thread.join(LOG_TIMEOUT_S)  # its pipe ends with the processes
        self._end(f"SGLang's processes ended; their last log lines:\n{self.log_tail()}")

    async def _give_up(self, reason: str) -> None:
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
            self._ready.exception()  # looked at, so that asyncio does not report it if nobody waits

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
        # Kills once, at the latest at the interpreter's exit: later the number may be another process's.
        self._kill = weakref.finalize(self, _kill_group, self._process.pid)
        assert self._process.stdout is not None
        self._log_thread = threading.Thread(
            target=_follow, args=(self._process.stdout, self._log, self._server), daemon=True
        )
        self._log_thread.start()
        return ours


def _nothing() -> None:
    """There is no process yet."""


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
    """Until no process of the group is left."""
    process.wait(EXIT_TIMEOUT_S)
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.02)
