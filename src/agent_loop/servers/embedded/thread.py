"""Thread of an engine, and the calls from event loops to it.

The thread runs the commands of all event loops between two steps, and waits for commands while the engine has no work.
After a step it makes one call per event loop, which delivers the results of ended requests and new tokens.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

from agent_loop.errors import AgentLoopError, ServerDied
from agent_loop.servers.embedded.engine import AnyRequest, EmbeddedEngine
from agent_loop.servers.embedded.request import EngineRequest, ScoreRequest
from agent_loop.servers.scores import TokenScores
from agent_loop.types import TokenChunk

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
"""Seconds that `stop` waits for the running step."""
STREAM_INTERVAL_S = 0.001
"""Seconds between two deliveries of new tokens, for each running request. Each delivery wakes the request's task."""


@dataclass(frozen=True, slots=True)
class _Receiver:
    """Receiver of results on the event loop of its caller. An exception is a result, too."""

    loop: asyncio.AbstractEventLoop
    receive: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[EmbeddedEngine], Any]
    receiver: _Receiver | None = None
    request: AnyRequest | None = None
    """Request whose results the receiver gets, instead of the result of `run`."""


_Delivery: TypeAlias = tuple[_Receiver, Any]
"""A receiver, and the result or exception for it."""
_STOP = _Command(run=lambda engine: None)


class EngineThread:
    """Runs an engine. Commands run between two steps, in the order of their calls.

    The methods raise `ServerDied` if the thread has ended.
    """

    def __init__(self, engine: EmbeddedEngine, *, name: str, num_threads: int) -> None:
        self._engine = engine
        self._name = name
        self._num_threads = num_threads
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._lock = threading.RLock()  # the garbage collector may call `stop` while this thread holds it
        self._end_reason: str | None = None
        self._cause: BaseException | None = None
        self._receivers: dict[AnyRequest, _Receiver] = {}
        self._next_tokens_at = 0.0
        self._executing: _Receiver | None = None
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def end_reason(self) -> str | None:
        """Why the thread has ended; None while it runs."""
        return self._end_reason

    async def call(self, run: Callable[[EmbeddedEngine], Any]) -> Any:
        """Call a function with the engine in its thread. Return the result, or raise its `AgentLoopError`."""
        future = asyncio.get_running_loop().create_future()
        self._enqueue(_Command(run, _receiver_of(future)))
        return await future

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk]:
        """Run a request and yield its tokens. Leaving the iteration early aborts the request."""
        results: asyncio.Queue[list[TokenChunk] | BaseException] = asyncio.Queue()
        receiver = _Receiver(asyncio.get_running_loop(), results.put_nowait)
        self._enqueue(_Command(lambda engine: engine.submit(request), receiver, request))
        has_ended = False
        try:
            while not has_ended:
                chunks = await results.get()
                has_ended = isinstance(chunks, BaseException) or chunks[-1].stop_reason is not None
                if isinstance(chunks, BaseException):
                    raise chunks
                for chunk in chunks:
                    yield chunk
        finally:
            if not has_ended:
                self.notify(lambda engine: engine.abort(request))

    async def score(self, request: ScoreRequest) -> TokenScores:
        """Score a text. Cancelling the call cancels the request."""
        future = asyncio.get_running_loop().create_future()
        submit = _Command(lambda engine: engine.submit_score(request), _receiver_of(future), request)
        self._enqueue(submit)
        try:
            return await future
        except asyncio.CancelledError:
            self.notify(lambda engine: engine.cancel_score(request))
            raise

    def notify(self, run: Callable[[EmbeddedEngine], object]) -> None:
        """Call a function with the engine in its thread, without a result. Does nothing if the thread has ended."""
        with self._lock:
            if self._end_reason is None:
                self._inbox.put(_Command(run))

    def stop(self) -> None:
        """Stop the thread after the running step. Pending calls and requests fail."""
        with self._lock:
            if self._end_reason is None:
                self._inbox.put(_STOP)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_TIMEOUT_S)

    def _enqueue(self, command: _Command) -> None:
        with self._lock:
            if self._end_reason is not None:
                raise self._error(command.request)
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
        if receiver is None:
            return
        if command.request is not None and result is None:
            self._receivers[command.request] = receiver
        else:
            self._deliver_new()  # deliver the requests that an abort ended before its own result
            _deliver([(receiver, result)])

    def _deliver_new(self) -> None:
        deliveries: list[_Delivery] = [
            (self._receivers.pop(request), outcome) for request, outcome in self._engine.take_finished()
        ]
        now = time.monotonic()
        if now >= self._next_tokens_at:
            self._next_tokens_at = now + STREAM_INTERVAL_S * len(self._receivers)
            for request, receiver in self._receivers.items():
                if isinstance(request, EngineRequest) and (chunks := request.take_new_chunks()):
                    deliveries.append((receiver, chunks))
        _deliver(deliveries)

    def _end(self, reason: str, *, cause: BaseException | None = None) -> None:
        with self._lock:
            self._end_reason, self._cause = reason, cause
        deliveries: list[_Delivery] = [
            (receiver, self._error(request)) for request, receiver in self._receivers.items()
        ]
        self._receivers.clear()
        if self._executing is not None:
            deliveries.append((self._executing, self._error()))
        while not self._inbox.empty():
            command = self._inbox.get()
            if command.receiver is not None:
                deliveries.append((command.receiver, self._error(command.request)))
        try:
            self._engine.release()
        finally:
            _deliver(deliveries)

    def _error(self, request: AnyRequest | None = None) -> ServerDied:
        request_id = "" if request is None else request.request_id
        error = ServerDied(
            f"{self._end_reason}; start a new server", server=self._name, request_id=request_id
        )
        error.__cause__ = self._cause
        return error


def _receiver_of(future: asyncio.Future[Any]) -> _Receiver:
    return _Receiver(future.get_loop(), partial(_resolve, future))


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


def _deliver(deliveries: list[_Delivery]) -> None:
    """Deliver results on the event loops of their receivers, with one call per loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Delivery]] = {}
    for receiver, result in deliveries:
        by_loop.setdefault(receiver.loop, []).append((receiver, result))
    for loop, deliveries_of_loop in by_loop.items():
        try:
            loop.call_soon_threadsafe(_receive, deliveries_of_loop)
        except RuntimeError:
            logger.debug("an event loop closed before it received %d results", len(deliveries_of_loop))


def _receive(deliveries: list[_Delivery]) -> None:
    for receiver, result in deliveries:
        receiver.receive(result)
