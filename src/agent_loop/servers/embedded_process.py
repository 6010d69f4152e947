"""The embedded engine in its own process, so that it computes while the event loop of the rollouts runs.

Server and process are connected by a socket. A call is a number, the name of a method and its arguments; a reply is the
call's number, a result or an exception, and whether it is the last one. Calls run concurrently.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import pickle
import socket
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any

from agent_loop.errors import AgentLoopError, ServerDied, ServerError
from agent_loop.runtime.concurrency import running_in_background
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.base import AsyncServerBase, ServerHealth, ServerSpec
from agent_loop.servers.embedded.server import ABILITIES, EmbeddedServer, embedded_config
from agent_loop.servers.process import EngineProcess
from agent_loop.servers.publishing import WeightPublisher
from agent_loop.servers.scores import TokenScores
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk
from agent_loop.weights.receiver import WeightReceiver

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

SIZE_BYTES = 8


class _Connection:
    """One end of a socket between two processes that trust each other.

    Messages that are sent in one iteration of the event loop are pickled together.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._unsent: list[tuple[Any, ...]] = []

    @classmethod
    async def open(cls, end: socket.socket) -> _Connection:
        """Open a connection on a connected Unix socket and take ownership of the socket."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, *message: Any) -> None:
        """Send a message. Does nothing if the connection is broken; `messages` ends then."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_all)
        self._unsent.append(message)

    async def messages(self) -> AsyncGenerator[Any]:
        """Yield received messages until the other end is closed."""
        while True:
            try:
                size = int.from_bytes(await self._reader.readexactly(SIZE_BYTES))
                data = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            for message in pickle.loads(data):
                yield message

    def close(self) -> None:
        """Send the unsent messages and close the connection. Can be called again."""
        self._send_all()
        self._writer.close()

    def _send_all(self) -> None:
        messages, self._unsent = self._unsent, []
        if messages and not self._writer.is_closing():
            data = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
            self._writer.writelines((len(data).to_bytes(SIZE_BYTES), data))


class EmbeddedProcess(AsyncServerBase):
    """An `EmbeddedServer` in a child process, so that engine and rollouts do not share the GIL.

    Useful if a second CPU core is free: the start takes seconds, because `torch` is imported again, and the process
    needs its own memory. The process loads the model itself and receives weight updates through shared memory. See
    `EmbeddedServer` for everything else.
    """

    def __init__(self, spec: ServerSpec) -> None:
        """Validate the options. `start` starts the process."""
        self.name = spec.name
        self.abilities = ABILITIES
        self.max_concurrent = embedded_config(spec).max_slots
        self._spec = spec
        self._publisher = WeightPublisher(
            spec.model, transfer=spec.weight_transfer, is_same_host=True, num_receivers=1
        )
        self._process = EngineProcess(spec.name)
        self._connection: _Connection | None = None
        self._background = AsyncExitStack()
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Queue[tuple[Any, bool]]] = {}
        """Replies of running calls, by number: result or exception, and whether it is the last one."""
        self._end = "the server has not been started"
        """Why the process takes no calls; empty while it runs."""

    @classmethod
    def create(cls, spec: ServerSpec) -> EmbeddedProcess:
        """Create the server for `rollout.engine: embedded_process`. `engine_kwargs` are fields of `EmbeddedConfig`."""
        return cls(spec)

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process.start(__name__, str(fd), devices=self._spec.devices, pass_fds=[fd])
        self._connection = await _Connection.open(ours)
        self._end = ""
        await self._background.enter_async_context(running_in_background(self._receive(self._connection)))
        try:
            self.abilities = await self._process.ready(
                lambda: self._call("start", self._spec), timeout_s=self._spec.start_timeout_s
            )
        except BaseException:
            await self.close()
            raise

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        arguments = (prompt_ids, sampling_params, request_id, attachments)
        async with aclosing(self._exchange("stream", *arguments, request_id=request_id)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        return await self._call("score", token_ids, start, top_logprobs)

    async def abort(self, request_id: str) -> None:
        if not self._end:
            await self._call("abort", request_id)

    def end_session(self, request_id: str) -> None:
        if self._connection is not None:
            self._connection.send(next(self._numbers), "end_session", (request_id,))

    async def wake_up(self) -> None:
        await self._call("wake_up")

    async def sleep(self) -> None:
        await self._call("sleep")

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        async with self._publisher.offer(weights, weight_version=weight_version) as handle:
            await self._call("update_weights", handle.to_json(), weight_version)

    async def health(self) -> ServerHealth:
        if self._end:
            return ServerHealth(
                is_alive=False, num_running=0, num_waiting=0, weight_version=-1, detail=self._end
            )
        return await self._call("health")

    async def close(self) -> None:
        self._publisher.close()
        self._fail_calls(self._end or "the server was closed")
        if self._connection is not None:
            self._connection.close()
        await self._process.close()
        await self._background.aclose()

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method in the process and return its result. Cancelling the caller cancels the method too."""
        async with aclosing(self._exchange(method, *arguments)) as replies:
            return await anext(replies)

    async def _exchange(self, method: str, *arguments: Any, request_id: str = "") -> AsyncGenerator[Any]:
        """Call a method in the process and yield its results. Closing the generator early cancels the method."""
        if self._end or self._connection is None:
            raise self._died(request_id)
        number = next(self._numbers)
        replies = self._replies[number] = asyncio.Queue[tuple[Any, bool]]()
        self._connection.send(number, method, arguments)
        is_last = False
        try:
            while not is_last:
                value, is_last = await replies.get()
                if isinstance(value, BaseException):
                    raise value
                yield value
        finally:
            del self._replies[number]
            if not is_last and not self._end:
                self._connection.send(number, "cancel", ())

    async def _receive(self, connection: _Connection) -> None:
        async for number, value, is_last in connection.messages():
            if number in self._replies:
                self._replies[number].put_nowait((value, is_last))
        await self._process.ended.wait()
        self._fail_calls(self._process.end)

    def _fail_calls(self, reason: str) -> None:
        self._end = self._end or reason
        for replies in self._replies.values():
            replies.put_nowait((self._died(""), True))

    def _died(self, request_id: str) -> ServerDied:
        return ServerDied(self._end, server=self.name, request_id=request_id)


class _Host:
    """Runs the calls of a connection in the engine's process."""

    def __init__(self, connection: _Connection, task_group: asyncio.TaskGroup) -> None:
        self._connection = connection
        self._task_group = task_group
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._receiver = WeightReceiver()
        self._server: EmbeddedServer | None = None

    def handle(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Start a call. `cancel` cancels the running call of the same number."""
        if method == "cancel":
            if task := self._tasks.get(number):
                task.cancel()
        elif method == "end_session":
            # Later in the event loop, so that calls that were cancelled just before are aborted first.
            asyncio.get_running_loop().call_soon(self._started.end_session, *arguments)
        else:
            task = self._tasks[number] = self._task_group.create_task(self._run(number, method, arguments))
            task.add_done_callback(lambda _: self._tasks.pop(number))

    @property
    def _started(self) -> EmbeddedServer:
        assert self._server is not None, "the first call is start"
        return self._server

    async def _run(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            if method == "stream":
                await self._stream(number, *arguments)
            else:
                self._connection.send(number, await self._result(method, arguments), True)
        except AgentLoopError as error:
            self._connection.send(number, error, True)
        except Exception as error:  # the process's edge: any other error has to reach the caller too
            logger.exception("a call of %s failed", method)
            self._connection.send(number, ServerError(describe_error(error)), True)

    async def _result(self, method: str, arguments: tuple[Any, ...]) -> Any:
        match method, arguments:
            case "start", (spec,):
                self._server = await run_in_thread(EmbeddedServer.create, spec)
                gc.freeze()  # full collections need not scan libraries
                return self._server.abilities
            case "score", (token_ids, start, top_logprobs):
                return await self._started.score(token_ids, start=start, top_logprobs=top_logprobs)
            case "update_weights", (handle, weight_version):
                weights = await run_in_thread(self._receiver.receive, handle)
                return await self._started.update_weights(weights, weight_version=weight_version)
            case _:
                return await getattr(self._started, method)(*arguments)

    async def _stream(
        self,
        number: int,
        prompt_ids: IntArray,
        params: SamplingParams,
        request_id: str,
        attachments: Sequence[Attachment],
    ) -> None:
        chunks = self._started.stream(prompt_ids, params, request_id, attachments=attachments)
        async with aclosing(chunks):
            async for chunk in chunks:
                self._connection.send(number, chunk, chunk.stop_reason is not None)


async def _serve(end: socket.socket) -> None:
    """Serve calls until the connection closes."""
    connection = await _Connection.open(end)
    async with asyncio.TaskGroup() as task_group:
        host = _Host(connection, task_group)
        async for call in connection.messages():
            host.handle(*call)
        os._exit(0)  # nothing here has to be kept, and the engine's thread may be in the middle of a step


def main(fd: str) -> None:
    """Serve the connection with this file descriptor. Runs in the engine's process."""
    asyncio.run(_serve(socket.socket(fileno=int(fd))))
