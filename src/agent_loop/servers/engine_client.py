"""Base of the clients of engines with an HTTP API, which run elsewhere or in processes that this run starts."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from typing import TYPE_CHECKING, Any, Self

from agent_loop.errors import ServerDied, ServerError, WeightsError
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth, ServerSpec
from agent_loop.servers.http import HttpClient, HttpStatusError
from agent_loop.servers.process import EngineProcess
from agent_loop.servers.publishing import WeightPublisher
from agent_loop.types import TokenChunk

if TYPE_CHECKING:
    import torch

    from agent_loop.weights.handle import WeightHandle

CONTROL_TIMEOUT_S = 600.0
HEALTH_TIMEOUT_S = 10.0
ABORT_INTERVAL_S = 0.1
POLL_S = 0.1
NOT_STARTED = "the server was not started; await start() first"
CLOSED = "the server was closed; create another server"


@dataclass(slots=True, eq=False)
class RunningRequest:
    """Request in flight."""

    id: str
    """Id of the request in the engine."""
    is_sent: bool = False
    is_known: bool = False
    """Whether the engine has sampled a token of it."""
    is_aborted: bool = False
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load that an engine reports."""

    kv_cache_share: float | None = None
    num_waiting: int = 0
    """Queued requests of all clients."""


class EngineClient(AsyncServerBase, ABC):
    """Client of one engine. A subclass defines the requests and the control calls of an engine's API."""

    _stop_grace_s = 0.0
    """Seconds for the engine's process to end by itself."""
    _publisher: WeightPublisher | None = None
    _how_to_update = ""
    """Remedy in the error of a server that accepts no weights."""

    def __init__(self, name: str, http: HttpClient, *, process: EngineProcess | None = None) -> None:
        self.name = name
        self._http = http
        self._process = process
        self._running: dict[str, RunningRequest] = {}
        """Requests in flight, by session."""
        self._numbers = count()
        self._control = asyncio.Lock()
        self._weight_version = 0
        self._is_asleep = False
        self._trouble = NOT_STARTED
        """Why the server cannot be used; empty if it can."""
        self._mixed_weights = ""
        """Why the server takes no requests until new weights are published; empty if it does."""

    @classmethod
    def create(cls, spec: ServerSpec) -> Self:
        """Create a server from its specification."""
        return cls(spec)  # pyright: ignore[reportCallIssue]  (subclasses create the HTTP client)

    async def abort(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is None:
            return
        running.is_aborted = True
        while running.is_sent and not running.is_over.is_set():
            # Repeated until a token comes, because the engine ignores an abort that arrives before its request. The end
            # is not awaited: the caller may be the one who reads the stream.
            is_known = running.is_known
            with suppress(ServerError):  # the request itself fails with the same error
                await self._send_abort(running)
            if is_known:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_INTERVAL_S):
                    await running.is_over.wait()

    async def wake_up(self) -> None:
        async with self._control:
            await self._allocate()
            self._is_asleep = False

    async def sleep(self) -> None:
        """Refuse requests until `wake_up`. Frees memory only with the ability `SLEEP`."""
        async with self._control:
            if self._running:
                raise ServerError(
                    f"{len(self._running)} requests are still running; await or abort them before sleep()",
                    server=self.name,
                )
            was_asleep, self._is_asleep = self._is_asleep, True
            if Ability.SLEEP in self.abilities and not was_asleep:
                await self._release()

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        async with self._control:
            self._refuse_if_unusable(for_update=True)
            if self._publisher is None:
                raise WeightsError(f"{self._http.url} accepts no weights; {self._how_to_update}")
            async with (
                self._publisher.offer(weights, weight_version=weight_version) as handle,
                self._typed_errors(""),
                self._paused(),
            ):
                await self._load(handle)
                self._weight_version = weight_version

    async def health(self) -> ServerHealth:
        detail, load = self._trouble or self._mixed_weights, EngineLoad()
        if self._process is not None and self._process.ended.is_set() and not self._trouble:
            detail = self._process.end
        if not detail:
            try:
                load = await self._report_load()
            except ServerError as error:
                detail = str(error)
        if detail:
            return ServerHealth(False, 0, 0, self._weight_version, detail)
        num_sent = sum(running.is_sent for running in self._running.values())
        num_waiting = min(load.num_waiting, num_sent)
        return ServerHealth(
            is_alive=True,
            num_running=num_sent - num_waiting,
            num_waiting=num_waiting + len(self._running) - num_sent,
            weight_version=self._weight_version,
            kv_cache_share=load.kv_cache_share,
        )

    async def close(self) -> None:
        """Close the connections, which aborts the requests in flight. An engine that runs elsewhere continues."""
        self._trouble = CLOSED
        if self._publisher is not None:
            self._publisher.close()
        await self._http.close()
        if self._process is not None:
            await self._process.close(grace_s=self._stop_grace_s)

    # -- for subclasses --------------------------------------------------------------------------------------------

    @abstractmethod
    async def _send_abort(self, running: RunningRequest) -> None:
        """Ask the engine to abort a request."""

    async def _allocate(self) -> None:
        """Make the engine allocate the memory that `_release` freed. Called by every `wake_up`."""

    async def _release(self) -> None:
        """Make the engine free memory. Called if the server has the ability `SLEEP`."""

    def _paused(self) -> AbstractAsyncContextManager[None]:
        """Pause the engine while the body runs. Requests in flight are kept, and all caches are emptied."""
        return nullcontext()

    async def _load(self, handle: WeightHandle) -> None:
        """Load weights into the paused engine."""

    @abstractmethod
    async def _report_load(self) -> EngineLoad:
        """Check the health of the engine, and return its load."""

    async def _cause_of(self, error: ServerError, request_id: str) -> Exception:
        """Return the cause of an error, which may be the error itself."""
        return error

    async def _launch(
        self,
        spec: ServerSpec,
        module: str,
        options: Mapping[str, Any],
        *,
        inspect: Callable[[], Coroutine[Any, Any, None]],
        environment: Mapping[str, str],
    ) -> None:
        """Start the engine's process, wait until the engine responds, and inspect it."""
        process = self._process
        assert process is not None

        async def wait() -> None:
            while True:
                with suppress(ServerDied, HttpStatusError):  # it does not listen yet, or the engine starts
                    await self._http.get_json("/health")
                    break
                await asyncio.sleep(POLL_S)
            await inspect()

        file = process.folder / "options.json"
        file.write_text(json.dumps(options), encoding="utf-8")
        process.start(module, str(file), devices=spec.devices, environment=environment)
        try:
            await process.ready(wait, timeout_s=spec.start_timeout_s)
        except BaseException:
            await self.close()
            raise
        self._trouble = ""

    @contextmanager
    def _running_as(self, request_id: str, engine_id: str) -> Generator[RunningRequest]:
        """Register a request while the body runs. A session has at most one."""
        if request_id in self._running:
            raise ServerError(
                "a request of this session is already running; await or abort it first",
                server=self.name,
                request_id=request_id,
            )
        running = self._running[request_id] = RunningRequest(engine_id)
        try:
            yield running
        finally:
            del self._running[request_id]
            running.is_over.set()

    def _refuse_if_unusable(self, request_id: str = "", *, for_update: bool = False) -> None:
        if self._process is not None and self._process.ended.is_set() and not self._trouble:
            raise ServerDied(self._process.end, server=self.name, request_id=request_id)
        trouble = self._trouble
        if not for_update:
            asleep = "the server is asleep; call wake_up first" if self._is_asleep else ""
            trouble = trouble or self._mixed_weights or asleep
        if trouble:
            raise ServerError(trouble, server=self.name, request_id=request_id)

    @asynccontextmanager
    async def _typed_errors(self, request_id: str) -> AsyncGenerator[None]:
        """Name the cause of errors: the server was closed, or its engine has ended."""
        try:
            yield
        except ServerError as error:
            if self._trouble == CLOSED:
                raise ServerError(CLOSED, server=self.name, request_id=request_id) from error
            cause = await self._cause_of(error, request_id)
            if (
                isinstance(cause, ServerDied)
                and self._process is not None
                and await self._process.has_ended()
            ):
                cause = ServerDied(self._process.end, server=self.name, request_id=request_id)
            if cause is error:
                raise
            raise cause from error

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self._http.post_json(path, body, timeout_s=CONTROL_TIMEOUT_S)


async def stamped(
    replies: AsyncGenerator[tuple[TokenChunk, Sequence[int]]], *, current_version: Callable[[], int]
) -> AsyncGenerator[TokenChunk]:
    """Yield chunks as they come until the first weight update, and the later tokens at the end of the completion.

    Before the first update only one version is possible. A chunk that is read after the update may have been sampled
    before it.

    Args:
        replies: Chunks, and the version of each token of the whole completion. Only those of the last chunk are used.
        current_version: Returns the version of the engine's weights.
    """
    first_version = current_version()
    num_yielded, held = 0, list[TokenChunk]()
    async with aclosing(replies):
        async for chunk, versions in replies:
            is_last = chunk.stop_reason is not None
            if not is_last and not held and current_version() == first_version:
                num_yielded += len(chunk.token_ids)
                yield replace(chunk, weight_version=first_version)
                continue
            held.append(chunk)
            if is_last:
                rest = replace(TokenChunk.joined(held), weight_version=current_version())
                for part in stamp(rest, first=num_yielded, weight_versions=versions):
                    yield part


def stamp(chunk: TokenChunk, *, first: int, weight_versions: Sequence[int]) -> list[TokenChunk]:
    """Split a chunk at its weight versions.

    Args:
        first: Position of the chunk's first token in the completion.
        weight_versions: Version of each token of the completion. The last version holds for all later tokens. Empty
            leaves the chunk as it is.
    """
    if not weight_versions:
        return [chunk]
    last = len(weight_versions) - 1
    versions = [weight_versions[min(first + place, last)] for place in range(len(chunk.token_ids))]
    chunks: list[TokenChunk] = []
    start = 0
    for version, run in groupby(versions or weight_versions[-1:]):
        end = start + len(list(run))
        chunks.append(replace(chunk.part(start, end), weight_version=version))
        start = end
    return chunks


def as_version(label: Any) -> int:
    """Return an engine's label of a weight version as a number: 0 for the name that an engine starts with."""
    return int(label) if str(label).isdecimal() else 0


def token_versions(spans: Any) -> list[int]:
    """Return the version of each token, from spans of tokens as vLLM and SGLang report them."""
    return [
        as_version(span["version"])
        for span in spans or ()
        for _ in range(int(span["end"]) - int(span["start"]))
    ]
