"""What runs in the engine's process: an `EmbeddedServer`, and the calls that come by the line.

    python -m agent_loop.servers.embedded_process.host FILE_DESCRIPTOR

Ends when the line does, so that it never outlives the process that started it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from agent_loop.errors import AgentLoopError, ServerError
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.garbage_collection import freeze_objects
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.base import ServerSpec
from agent_loop.servers.embedded.server import EmbeddedServer
from agent_loop.servers.embedded_process.line import Answer, Call, Line
from agent_loop.weights import WeightReceiver

logger = logging.getLogger(__name__)


class Host:
    """Answers the calls of one line; each runs in a task of its own."""

    def __init__(self, line: Line, server: EmbeddedServer) -> None:
        self._line = line
        self._server = server
        self._receiver = WeightReceiver()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "generate": self._generate,
            "abort": server.abort,
            "wake_up": server.wake_up,
            "sleep": server.sleep,
            "update_weights": self._update_weights,
            "health": server.health,
        }

    def take(self, call: Call) -> None:
        """Begins what is asked for, or cancels what was begun under the number."""
        if call.method == "cancel":
            if task := self._tasks.get(call.number):
                task.cancel()
            return
        if call.method == "end_session":
            # Behind the steps in which calls that were cancelled just now hear of it.
            asyncio.get_running_loop().call_soon(self._server.end_session, *call.arguments)
            return
        task = self._tasks[call.number] = asyncio.create_task(self._run(call))
        task.add_done_callback(lambda _: self._tasks.pop(call.number))

    async def close(self) -> None:
        """Ends the server; the calls that run fail."""
        await self._server.close()
        self._receiver.close()

    async def _run(self, call: Call) -> None:
        try:
            if call.method == "stream":
                await self._stream(call)
            else:
                answer = await self._methods[call.method](*call.arguments)
                self._line.say(Answer(call.number, answer))
        except AgentLoopError as error:
            self._line.say(Answer(call.number, error))
        except Exception as error:  # the process's edge: whatever broke must reach the one who asked
            logger.exception("server %s: a call failed", self._server.name)
            self._line.say(Answer(call.number, ServerError(describe_error(error), server=self._server.name)))

    async def _generate(
        self, prompt_ids: Any, sampling_params: Any, request_id: str, attachments: Any
    ) -> Any:
        return await self._server.generate(prompt_ids, sampling_params, request_id, attachments=attachments)

    async def _stream(self, call: Call) -> None:
        prompt_ids, sampling_params, request_id, attachments = call.arguments
        async for chunk in self._server.stream(
            prompt_ids, sampling_params, request_id, attachments=attachments
        ):
            self._line.say(Answer(call.number, chunk, is_last=chunk.stop_reason is not None))

    async def _update_weights(self, handle: str, weight_version: int) -> None:
        weights = await run_in_thread(lambda: dict(self._receiver.receive_all(handle)))
        await self._server.update_weights(weights.items(), weight_version=weight_version)


async def serve(end: socket.socket) -> None:
    """Makes the server that the first call describes, and answers until the line ends."""
    line = await Line.open(end)
    host: Host | None = None
    try:
        async for call in line.hear():
            assert isinstance(call, Call), "answers go the other way"
            if host is None:
                host = await _start(line, call)
            else:
                host.take(call)
    finally:
        if host is not None:
            await host.close()
        line.close()


async def _start(line: Line, call: Call) -> Host | None:
    (spec,) = call.arguments
    assert isinstance(spec, ServerSpec), "the first call describes the server"
    try:
        server = await run_in_thread(EmbeddedServer.create, spec)
    except AgentLoopError as error:
        line.say(Answer(call.number, error))
        return None
    freeze_objects()
    line.say(Answer(call.number, server.abilities))
    return Host(line, server)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
