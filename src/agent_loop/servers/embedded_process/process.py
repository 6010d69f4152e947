"""The engine's process, from outside."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from agent_loop.errors import ServerDied, ServerTimeout
from agent_loop.servers.base import Ability, ServerSpec
from agent_loop.servers.embedded_process.line import Answer, Call, Line

logger = logging.getLogger(__name__)

HOST = "agent_loop.servers.embedded_process.host"
STOP_TIMEOUT_S = 15.0
"""The engine finishes the step that is running before it ends by itself."""


class EngineProcess:
    """Starts the process, asks it, and ends it."""

    def __init__(self, name: str) -> None:
        self.end_reason: str | None = "it was not started yet"
        """Why nothing can be asked; None while something can."""
        self._name = name
        self._numbers = itertools.count()
        self._waiting: dict[int, Callable[[Answer], None]] = {}
        self._process: Process | None = None
        self._line: Line | None = None
        self._listening: asyncio.Task[None] | None = None

    async def start(self, spec: ServerSpec) -> frozenset[Ability]:
        """Start the process, load the model there, and return what the engine can do with it.

        Raises:
            ConfigError: The engine refuses the model or an option.
            ServerDied: The process ended meanwhile.
            ServerTimeout: It took longer than `spec.start_timeout_s`.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", HOST, str(theirs.fileno())]
            self._process = await asyncio.create_subprocess_exec(
                *command, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._line = await Line.open(ours)
        self.end_reason = None
        self._listening = asyncio.create_task(self._listen(self._line, self._process))
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                return await self.ask("start", spec)
        except BaseException as error:
            await self.stop(timeout_s=0)
            if not isinstance(error, TimeoutError):
                raise
            raise ServerTimeout(
                f"the engine did not come up in {spec.start_timeout_s:g} s; raise rollout.start_timeout_s",
                server=self._name,
            ) from None

    async def ask(self, method: str, *arguments: Any, request_id: str = "") -> Any:
        """What the method gives there. Cancelled, it is cancelled there too.

        Raises:
            AgentLoopError: What it raised there.
            ServerDied: The process is gone.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        number = self._call(
            method, arguments, request_id=request_id, to=lambda answer: _resolve(future, answer)
        )
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            self._waiting.pop(number, None)

    async def ask_streamed(self, method: str, *arguments: Any, request_id: str = "") -> AsyncGenerator[Any]:
        """The parts that the method gives there; leaving the iteration early cancels it there. Errors as `ask`."""
        parts: asyncio.Queue[Answer] = asyncio.Queue()
        number = self._call(method, arguments, request_id=request_id, to=parts.put_nowait)
        is_over = False
        try:
            while not is_over:
                answer = await parts.get()
                is_over = answer.is_last
                if isinstance(answer.value, BaseException):
                    raise answer.value
                yield answer.value
        finally:
            self._waiting.pop(number, None)
            if not is_over:
                self._cancel(number)

    def tell(self, method: str, *arguments: Any) -> None:
        """Says something that is not answered; does nothing if the process is gone."""
        if self._line is not None and self.end_reason is None:
            self._line.say(Call(next(self._numbers), method, arguments))

    async def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends the process; what is pending fails. Can be called again.

        Args:
            timeout_s: How long it may take to end by itself.
        """
        self._end("the server was closed")
        if self._line is not None:
            self._line.close()
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
        if self._listening is not None:
            await self._listening

    def _call(
        self, method: str, arguments: tuple[Any, ...], *, request_id: str, to: Callable[[Answer], None]
    ) -> int:
        if self.end_reason is not None or self._line is None:
            raise self._died(request_id)
        number = next(self._numbers)
        self._waiting[number] = to
        self._line.say(Call(number, method, arguments))
        return number

    def _cancel(self, number: int) -> None:
        if self._line is not None and self.end_reason is None:
            self._line.say(Call(number, "cancel"))

    async def _listen(self, line: Line, process: Process) -> None:
        async for answer in line.hear():
            assert isinstance(answer, Answer), "calls go the other way"
            if to := self._waiting.get(answer.number):
                to(answer)
        self._end(f"its process ended with exit code {await process.wait()}")

    def _end(self, reason: str) -> None:
        self.end_reason = self.end_reason or reason
        for number, to in self._waiting.items():
            to(Answer(number, self._died("")))

    def _died(self, request_id: str) -> ServerDied:
        return ServerDied(f"{self.end_reason}; start another", server=self._name, request_id=request_id)


def _resolve(future: asyncio.Future[Any], answer: Answer) -> None:
    if future.done():
        return
    if isinstance(answer.value, BaseException):
        future.set_exception(answer.value)
    else:
        future.set_result(answer.value)
