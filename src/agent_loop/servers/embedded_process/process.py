"""Client of the engine's process: starts the process, calls its methods, and stops it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

from agent_loop.errors import ServerDied, ServerTimeout
from agent_loop.planning.devices import environment_for
from agent_loop.runtime.concurrency import running_in_background
from agent_loop.servers.base import Ability, ServerSpec
from agent_loop.servers.embedded_process.connection import EngineCall, EngineConnection, EngineReply

logger = logging.getLogger(__name__)

HOST = "agent_loop.servers.embedded_process.host"
STOP_TIMEOUT_S = 15.0
"""Seconds for the engine to finish the running step and exit, before the process is killed."""


class EmbeddedEngineProcess:
    """Process of one embedded engine."""

    def __init__(self, name: str) -> None:
        self.end_reason: str | None = "the server has not been started"
        """Why the process takes no calls; None while it runs."""
        self._name = name
        self._numbers = itertools.count()
        self._pending: dict[int, Callable[[EngineReply], None]] = {}
        """Callbacks for the replies of running calls, by number."""
        self._process: Process | None = None
        self._connection: EngineConnection | None = None
        self._background = AsyncExitStack()

    async def start(self, spec: ServerSpec) -> frozenset[Ability]:
        """Start the process, load the model there, and return the abilities of the engine.

        Raises:
            ConfigError: The engine does not support the model, or an option is invalid.
            ServerDied: The process ended during the start.
            ServerTimeout: The start took longer than `spec.start_timeout_s`.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", HOST, str(theirs.fileno())]
            self._process = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, **environment_for(spec.devices)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = await EngineConnection.open(ours)
        self.end_reason = None
        replies = self._receive_replies(self._connection, self._process)
        await self._background.enter_async_context(running_in_background(replies))
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                return await self.call("start", spec)
        except BaseException as error:
            await self.stop(timeout_s=0)
            if not isinstance(error, TimeoutError):
                raise
            raise ServerTimeout(
                f"the engine did not start within {spec.start_timeout_s:g} s; raise rollout.start_timeout_s",
                server=self._name,
            ) from None

    async def call(self, method: str, *arguments: Any, request_id: str = "") -> Any:
        """Call a method in the process and return its result. Cancelling the caller cancels the method too.

        Raises:
            AgentLoopError: The method raised it.
            ServerDied: The process has ended.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        number = self._send_call(
            method, arguments, request_id=request_id, on_reply=lambda reply: _resolve(future, reply)
        )
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            self._pending.pop(number, None)

    async def call_streamed(self, method: str, *arguments: Any, request_id: str = "") -> AsyncGenerator[Any]:
        """Call a streaming method in the process and yield its parts. Closing the iterator early cancels the method.

        Raises:
            AgentLoopError: The method raised it.
            ServerDied: The process has ended.
        """
        replies: asyncio.Queue[EngineReply] = asyncio.Queue()
        number = self._send_call(method, arguments, request_id=request_id, on_reply=replies.put_nowait)
        has_ended = False
        try:
            while not has_ended:
                reply = await replies.get()
                has_ended = reply.is_last
                if isinstance(reply.value, BaseException):
                    raise reply.value
                yield reply.value
        finally:
            self._pending.pop(number, None)
            if not has_ended:
                self._cancel(number)

    def notify(self, method: str, *arguments: Any) -> None:
        """Call a method without waiting for a reply. Does nothing if the process has ended."""
        if self._connection is not None and self.end_reason is None:
            self._connection.send(EngineCall(next(self._numbers), method, arguments))

    async def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the process; pending calls fail. Can be called again.

        Args:
            timeout_s: Seconds for the process to exit before it is killed.
        """
        self._end("the server was closed")
        if self._connection is not None:
            self._connection.close()
        if self._process is None or self._process.returncode is not None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            logger.debug("the engine of server %s took longer than %g s to end", self._name, timeout_s)
        finally:
            with suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
        await self._background.aclose()

    def _send_call(
        self,
        method: str,
        arguments: tuple[Any, ...],
        *,
        request_id: str,
        on_reply: Callable[[EngineReply], None],
    ) -> int:
        if self.end_reason is not None or self._connection is None:
            raise self._died(request_id)
        number = next(self._numbers)
        self._pending[number] = on_reply
        self._connection.send(EngineCall(number, method, arguments))
        return number

    def _cancel(self, number: int) -> None:
        if self._connection is not None and self.end_reason is None:
            self._connection.send(EngineCall(number, "cancel"))

    async def _receive_replies(self, connection: EngineConnection, process: Process) -> None:
        async for reply in connection.messages():
            assert isinstance(reply, EngineReply), "the engine's process sends replies only"
            if on_reply := self._pending.get(reply.number):
                on_reply(reply)
        self._end(f"its process ended with exit code {await process.wait()}")

    def _end(self, reason: str) -> None:
        self.end_reason = self.end_reason or reason
        for number, on_reply in self._pending.items():
            on_reply(EngineReply(number, self._died("")))

    def _died(self, request_id: str) -> ServerDied:
        return ServerDied(f"{self.end_reason}; start a new server", server=self._name, request_id=request_id)


def _resolve(future: asyncio.Future[Any], reply: EngineReply) -> None:
    if future.done():
        return
    if isinstance(reply.value, BaseException):
        future.set_exception(reply.value)
    else:
        future.set_result(reply.value)
