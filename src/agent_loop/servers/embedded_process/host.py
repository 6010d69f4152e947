"""Main module of the engine's process: serves calls to an `EmbeddedServer` over a connection.

    python -m agent_loop.servers.embedded_process.host FILE_DESCRIPTOR

The process ends when the connection closes, so it never outlives the process that started it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from agent_loop.errors import AgentLoopError, ServerError
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.base import ServerSpec
from agent_loop.servers.embedded.server import EmbeddedServer
from agent_loop.servers.embedded_process.connection import EngineCall, EngineConnection, EngineReply
from agent_loop.weights import WeightReceiver

logger = logging.getLogger(__name__)


class EngineHost:
    """Runs each call of a connection in its own task and sends the replies."""

    def __init__(
        self, connection: EngineConnection, server: EmbeddedServer, *, task_group: asyncio.TaskGroup
    ) -> None:
        self._connection = connection
        self._server = server
        self._receiver = WeightReceiver()
        self._task_group = task_group
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "generate": self._generate,
            "score": self._score,
            "abort": server.abort,
            "wake_up": server.wake_up,
            "sleep": server.sleep,
            "update_weights": self._update_weights,
            "health": server.health,
        }

    def handle(self, call: EngineCall) -> None:
        """Start a call. `cancel` cancels the running call of the same number."""
        if call.method == "cancel":
            if task := self._tasks.get(call.number):
                task.cancel()
            return
        if call.method == "end_session":
            # Later in the event loop, so that calls that were cancelled just before are aborted first.
            asyncio.get_running_loop().call_soon(self._server.end_session, *call.arguments)
            return
        task = self._tasks[call.number] = self._task_group.create_task(self._run(call))
        task.add_done_callback(lambda _: self._tasks.pop(call.number))

    async def close(self) -> None:
        """Close the server and cancel the running calls."""
        try:
            await self._server.close()
            self._receiver.close()
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _run(self, call: EngineCall) -> None:
        try:
            if call.method == "stream":
                await self._stream(call)
            else:
                result = await self._methods[call.method](*call.arguments)
                self._connection.send(EngineReply(call.number, result))
        except AgentLoopError as error:
            self._connection.send(EngineReply(call.number, error))
        except Exception as error:  # the process's edge: any other error has to reach the caller too
            logger.exception("server %s: a call failed", self._server.name)
            failure = ServerError(describe_error(error), server=self._server.name)
            self._connection.send(EngineReply(call.number, failure))

    async def _generate(
        self, prompt_ids: Any, sampling_params: Any, request_id: str, attachments: Any
    ) -> Any:
        return await self._server.generate(prompt_ids, sampling_params, request_id, attachments=attachments)

    async def _score(self, token_ids: Any, start: int, top_logprobs: int) -> Any:
        return await self._server.score(token_ids, start=start, top_logprobs=top_logprobs)

    async def _stream(self, call: EngineCall) -> None:
        prompt_ids, sampling_params, request_id, attachments = call.arguments
        async for chunk in self._server.stream(
            prompt_ids, sampling_params, request_id, attachments=attachments
        ):
            self._connection.send(EngineReply(call.number, chunk, is_last=chunk.stop_reason is not None))

    async def _update_weights(self, handle: str, weight_version: int) -> None:
        weights = await run_in_thread(self._receiver.receive, handle)
        await self._server.update_weights(weights, weight_version=weight_version)


async def serve(end: socket.socket) -> None:
    """Create the server that the first call specifies, and serve calls until the connection closes."""
    connection = await EngineConnection.open(end)
    host: EngineHost | None = None
    try:
        async with asyncio.TaskGroup() as task_group:
            try:
                async for call in connection.messages():
                    assert isinstance(call, EngineCall), "the engine's process receives calls only"
                    if host is None:
                        host = await _start(connection, call, task_group=task_group)
                    else:
                        host.handle(call)
            finally:
                if host is not None:
                    await host.close()
    finally:
        connection.close()


async def _start(
    connection: EngineConnection, call: EngineCall, *, task_group: asyncio.TaskGroup
) -> EngineHost | None:
    (spec,) = call.arguments
    assert isinstance(spec, ServerSpec), "the first call has the server's specification"
    try:
        server = await run_in_thread(EmbeddedServer.create, spec)
    except AgentLoopError as error:
        connection.send(EngineReply(call.number, error))
        return None
    gc.freeze()  # full collections need not scan libraries
    connection.send(EngineReply(call.number, server.abilities))
    return EngineHost(connection, server, task_group=task_group)


def main() -> None:
    """Serve the connection whose file descriptor is the first argument of the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
