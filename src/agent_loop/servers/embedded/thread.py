"""Thread of an engine, and the calls from event loops to it.

The thread runs the commands of all event loops between two steps, and waits for commands while the engine has no work.
After each step it makes one call per event loop, which delivers the results of ended requests and the new tokens of
streamed ones.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

from agent_loop.errors import AgentLoopError, ServerDied
from agent_loop.servers.embedded.engine import AnyRequest, EmbeddedEngine, RequestOutcome
from agent_loop.servers.embedded.request import EngineRequest
from agent_loop.servers.embedded.scoring import ScoreRequest
from agent_loop.servers.scores import TokenScores
from agent_loop.types import TokenChunk, TokenOutput

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
"""Seconds that `stop` waits for the running step."""


class TokenStream:
    """Chunks of a streamed completion, received on the event loop of the caller."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[list[TokenChunk] | BaseException] = asyncio.Queue()
        self.has_ended = False
        """Whether the last chunk was returned, or the error raised."""

    async def next_chunks(self) -> list[TokenChunk]:
        """Wait for the next chunks and return them. The last chunk has a stop reason.

        Raises:
            ServerError: The engine failed the request.
        """
        chunks = await self._queue.get()
        if isinstance(chunks, BaseException):
            self.has_ended = True
            raise chunks
        self.has_ended = chunks[-1].stop_reason is not None
        return chunks

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the caller."""
        return self._loop

    def put(self, chunks: list[TokenChunk] | BaseException) -> None:
        """Add chunks, or the error that ends the stream. Called on the event loop of the caller."""
        self._queue.put_nowait(chunks)


_Receiver: TypeAlias = asyncio.Future[Any] | TokenStream


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[EmbeddedEngine], Any]
    receiver: _Receiver | None = None
    request: AnyRequest | None = None
    """Request whose result the receiver gets, instead of the result of `run`."""


_Delivery: TypeAlias = tuple[_Receiver, Any]
"""A receiver, and the result or exception for it."""
_STOP = _Command(run=lambda engine: None)


class EngineThread:
    """Runs an engine. Commands run between two steps, in the order of their calls."""

    def __init__(self, engine: EmbeddedEngine, *, name: str, num_threads: int) -> None:
        self._engine = engine
        self._name = name
        self._num_threads = num_threads
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._lock = threading.RLock()  # the garbage collector may call `stop` while this thread holds it
        self._end_reason: str | None = None
        self._cause: BaseException | None = None
        self._receivers: dict[AnyRequest, _Receiver] = {}
        self._streams: dict[EngineRequest, TokenStream] = {}
        """The receivers of streamed requests."""
        self._executing: _Receiver | None = None
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def end_reason(self) -> str | None:
        """Why the thread has ended; None while it runs."""
        return self._end_reason

    def call(self, run: Callable[[EmbeddedEngine], Any]) -> asyncio.Future[Any]:
        """Call a function with the engine in its thread. The future receives the result or an `AgentLoopError`.

        Raises:
            ServerDied: The thread has ended.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._enqueue(_Command(run=run, receiver=future))
        return future

    def submit(self, request: EngineRequest) -> asyncio.Future[TokenOutput]:
        """Queue a request. The future receives its completion.

        Raises:
            ServerDied: The thread has ended.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._submit(request, future)
        return future

    def submit_streamed(self, request: EngineRequest) -> TokenStream:
        """Queue a request. The stream receives its tokens as they are sampled.

        Raises:
            ServerDied: The thread has ended.
        """
        stream = TokenStream()
        self._submit(request, stream)
        return stream

    def submit_score(self, request: ScoreRequest) -> asyncio.Future[TokenScores]:
        """Queue a text to score. The future receives its scores.

        Raises:
            ServerDied: The thread has ended.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._enqueue(
            _Command(run=lambda engine: engine.submit_score(request), receiver=future, request=request)
        )
        return future

    def notify(self, run: Callable[[EmbeddedEngine], object]) -> None:
        """Call a function with the engine in its thread, without a result. Does nothing if the thread has ended."""
        with self._lock:
            if self._end_reason is None:
                self._inbox.put(_Command(run=run))

    def abort(self, request: EngineRequest) -> None:
        """Abort a request whose caller no longer waits for it."""
        self.notify(lambda engine: engine.abort(request))

    def cancel_score(self, request: ScoreRequest) -> None:
        """Cancel a text to score whose caller no longer waits for it."""
        self.notify(lambda engine: engine.cancel_score(request))

    def stop(self) -> None:
        """Stop the thread after the running step. Pending calls and requests fail."""
        with self._lock:
            if self._end_reason is None:
                self._inbox.put(_STOP)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_TIMEOUT_S)

    def _submit(self, request: EngineRequest, receiver: _Receiver) -> None:
        self._enqueue(
            _Command(run=lambda engine: engine.submit(request), receiver=receiver, request=request),
            request_id=request.request_id,
        )

    def _enqueue(self, command: _Command, *, request_id: str = "") -> None:
        with self._lock:
            if self._end_reason is not None:
                raise self._error(request_id)
            self._inbox.put(command)

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while self._run_commands():
                if self._engine.has_work:
                    self._engine.step()
                self._deliver_new()
        except Exception as error:  # the thread's edge: any error has to reach the callers
            logger.exception("server %s: the engine failed", self._name)
            traceback.clear_frames(error.__traceback__)  # the frames' local variables hold the cache
            self._end(f"the engine failed with {type(error).__name__}: {error}", cause=error)
        else:
            self._end("the server was closed")

    def _run_commands(self) -> bool:
        """Run the queued commands, or wait for one if the engine has no work. Return False at the stop command."""
        while not self._inbox.empty() or not self._engine.has_work:
            command = self._inbox.get()
            if command is _STOP:
                return False
            self._execute(command)
            if self._inbox.empty():
                break
        return True

    def _execute(self, command: _Command) -> None:
        receiver = self._executing = command.receiver
        try:
            result = command.run(self._engine)
        except AgentLoopError as error:
            result = error
        self._executing = None
        if command.request is not None and receiver is not None and result is None:
            self._receivers[command.request] = receiver
            if isinstance(receiver, TokenStream) and isinstance(command.request, EngineRequest):
                self._streams[command.request] = receiver
            return
        if receiver is not None:
            self._deliver_new()  # deliver the requests that an abort ended before its own result
            _deliver([(receiver, result)])

    def _deliver_new(self) -> None:
        deliveries: list[_Delivery] = []
        for request, outcome in self._engine.take_finished():
            deliveries.append((self._receivers.pop(request), self._delivered(request, outcome)))
        deliveries += [
            (stream, chunks)
            for request, stream in self._streams.items()
            if (chunks := request.take_new_chunks())
        ]
        _deliver(deliveries)

    def _delivered(self, request: AnyRequest, outcome: RequestOutcome) -> Any:
        """Return what the receiver gets: the last chunks of a streamed completion, else the outcome."""
        if not isinstance(request, EngineRequest) or self._streams.pop(request, None) is None:
            return outcome
        return request.take_last_chunks(outcome) if isinstance(outcome, TokenOutput) else outcome

    def _end(self, reason: str, *, cause: BaseException | None = None) -> None:
        with self._lock:
            self._end_reason, self._cause = reason, cause
        deliveries: list[_Delivery] = [
            (receiver, self._error(request.request_id)) for request, receiver in self._receivers.items()
        ]
        self._receivers.clear()
        self._streams.clear()
        if self._executing is not None:
            deliveries.append((self._executing, self._error("")))
        while not self._inbox.empty():
            command = self._inbox.get()
            if command.receiver is not None:
                request_id = "" if command.request is None else command.request.request_id
                deliveries.append((command.receiver, self._error(request_id)))
        try:
            self._engine.release()
        finally:
            _deliver(deliveries)

    def _error(self, request_id: str) -> ServerDied:
        error = ServerDied(
            f"{self._end_reason}; start a new server", server=self._name, request_id=request_id
        )
        error.__cause__ = self._cause
        return error


def _deliver(deliveries: list[_Delivery]) -> None:
    """Deliver results on the event loops of their receivers, with one call per loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Delivery]] = {}
    for receiver, result in deliveries:
        by_loop.setdefault(receiver.get_loop(), []).append((receiver, result))
    for loop, deliveries_of_loop in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, deliveries_of_loop)
        except RuntimeError:
            logger.debug("an event loop closed before it received %d results", len(deliveries_of_loop))


def _resolve(deliveries: list[_Delivery]) -> None:
    for receiver, result in deliveries:
        if isinstance(receiver, TokenStream):
            receiver.put(result)
        elif receiver.done():
            continue
        elif isinstance(result, BaseException):
            receiver.set_exception(result)
        else:
            receiver.set_result(result)
