"""The thread that owns an engine, and the way from event loops to it and back.

Consumes commands from any event loop, waits for them when the engine has nothing to do, produces one wake-up per
step and event loop with everything that ended in that step, and what it added to completions that are streamed.
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
from agent_loop.servers.embedded.engine import Engine
from agent_loop.servers.embedded.request import GenerationRequest
from agent_loop.types import TokenChunk, TokenOutput

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
"""How long the interpreter's exit waits for the step that is running."""


class TokenFeed:
    """What a streamed completion adds, on the event loop that asked for it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts: asyncio.Queue[list[TokenChunk] | BaseException] = asyncio.Queue()
        self.is_over = False
        """The completion has ended, well or badly."""

    async def take(self) -> list[TokenChunk]:
        """The next parts, as soon as there are some; the last one has a stop reason.

        Raises:
            ServerError: The engine failed the request.
        """
        parts = await self._parts.get()
        if isinstance(parts, BaseException):
            self.is_over = True
            raise parts
        self.is_over = parts[-1].stop_reason is not None
        return parts

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def put(self, parts: list[TokenChunk] | BaseException) -> None:
        self._parts.put_nowait(parts)


_Reply: TypeAlias = asyncio.Future[Any] | TokenFeed


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[Engine], Any]
    reply: _Reply | None = None
    request: GenerationRequest | None = None
    """Set if the reply is to wait for this request's end."""


_Answer: TypeAlias = tuple[_Reply, Any]
_STOP = _Command(run=lambda engine: None)


class EngineThread:
    """Runs the engine. Commands run between two steps, in the order they came."""

    def __init__(self, engine: Engine, *, name: str, num_threads: int) -> None:
        self._engine = engine
        self._name = name
        self._num_threads = num_threads
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._lock = threading.RLock()  # the garbage collector may call `stop` while this thread holds it
        self._end_reason: str | None = None
        self._cause: BaseException | None = None
        self._replies: dict[GenerationRequest, _Reply] = {}
        self._feeds: dict[GenerationRequest, TokenFeed] = {}
        """Those of `_replies` that are streamed."""
        self._executing: _Reply | None = None
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def end_reason(self) -> str | None:
        """Why the thread takes no more commands; None while it does."""
        return self._end_reason

    def call(self, run: Callable[[Engine], Any]) -> asyncio.Future[Any]:
        """Has a function run on the engine; the future gets its result or its `AgentLoopError`.

        Raises:
            ServerDied: The thread has ended.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._post(_Command(run=run, reply=reply))
        return reply

    def submit(self, request: GenerationRequest) -> asyncio.Future[TokenOutput]:
        """Puts a request in line; the future gets its completion.

        Raises:
            ServerDied: The thread has ended.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._submit(request, reply)
        return reply

    def submit_streamed(self, request: GenerationRequest) -> TokenFeed:
        """Puts a request in line; the feed gets its tokens as they are sampled.

        Raises:
            ServerDied: The thread has ended.
        """
        feed = TokenFeed()
        self._submit(request, feed)
        return feed

    def tell(self, run: Callable[[Engine], object]) -> None:
        """Has a function run on the engine, which nobody waits for; does nothing if the thread has ended."""
        with self._lock:
            if self._end_reason is None:
                self._inbox.put(_Command(run=run))

    def forget(self, request: GenerationRequest) -> None:
        """Aborts a request that nobody awaits any more."""
        self.tell(lambda engine: engine.abort(request))

    def stop(self) -> None:
        """Ends the thread after the running step. What is pending fails."""
        with self._lock:
            if self._end_reason is None:
                self._inbox.put(_STOP)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_TIMEOUT_S)

    def _submit(self, request: GenerationRequest, reply: _Reply) -> None:
        self._post(
            _Command(run=lambda engine: engine.submit(request), reply=reply, request=request),
            request_id=request.request_id,
        )

    def _post(self, command: _Command, *, request_id: str = "") -> None:
        with self._lock:
            if self._end_reason is not None:
                raise self._error(request_id)
            self._inbox.put(command)

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while self._take_commands():
                if self._engine.has_work:
                    self._engine.step()
                self._deliver_new()
        except Exception as error:  # the thread's edge: whatever broke must reach those who wait
            logger.exception("server %s: the engine failed", self._name)
            traceback.clear_frames(error.__traceback__)  # their locals hold the cache
            self._end(f"the engine failed with {type(error).__name__}: {error}", cause=error)
        else:
            self._end("the server was closed")

    def _take_commands(self) -> bool:
        """Runs what came in; waits for something if the engine is idle. Returns False at the stop command."""
        while not self._inbox.empty() or not self._engine.has_work:
            command = self._inbox.get()
            if command is _STOP:
                return False
            self._execute(command)
            if self._inbox.empty():
                break
        return True

    def _execute(self, command: _Command) -> None:
        reply = self._executing = command.reply
        try:
            answer = command.run(self._engine)
        except AgentLoopError as error:
            answer = error
        self._executing = None
        if command.request is not None and reply is not None and answer is None:
            self._replies[command.request] = reply
            if isinstance(reply, TokenFeed):
                self._feeds[command.request] = reply
            return
        if reply is not None:
            self._deliver_new()  # first what an abort ended, then that it did
            _deliver([(reply, answer)])

    def _deliver_new(self) -> None:
        answers: list[_Answer] = []
        for request, outcome in self._engine.take_finished():
            is_streamed = self._feeds.pop(request, None) is not None
            if is_streamed and isinstance(outcome, TokenOutput):
                outcome = request.take_rest(outcome)
            answers.append((self._replies.pop(request), outcome))
        answers += [(feed, parts) for request, feed in self._feeds.items() if (parts := request.take_new())]
        _deliver(answers)

    def _end(self, reason: str, *, cause: BaseException | None = None) -> None:
        with self._lock:
            self._end_reason, self._cause = reason, cause
        answers: list[_Answer] = [
            (reply, self._error(request.request_id)) for request, reply in self._replies.items()
        ]
        self._replies.clear()
        self._feeds.clear()
        if self._executing is not None:
            answers.append((self._executing, self._error("")))
        while not self._inbox.empty():
            command = self._inbox.get()
            if command.reply is not None:
                request_id = "" if command.request is None else command.request.request_id
                answers.append((command.reply, self._error(request_id)))
        try:
            self._engine.release()
        finally:
            _deliver(answers)

    def _error(self, request_id: str) -> ServerDied:
        error = ServerDied(f"{self._end_reason}; start another", server=self._name, request_id=request_id)
        error.__cause__ = self._cause
        return error


def _deliver(answers: list[_Answer]) -> None:
    """Resolves futures on their event loops, with one call for each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Answer]] = {}
    for reply, answer in answers:
        by_loop.setdefault(reply.get_loop(), []).append((reply, answer))
    for loop, its_answers in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, its_answers)
        except RuntimeError:
            logger.debug("an event loop closed before %d answers reached it", len(its_answers))


def _resolve(answers: list[_Answer]) -> None:
    for reply, answer in answers:
        if isinstance(reply, TokenFeed):
            reply.put(answer)
        elif reply.done():
            continue
        elif isinstance(answer, BaseException):
            reply.set_exception(answer)
        else:
            reply.set_result(answer)
