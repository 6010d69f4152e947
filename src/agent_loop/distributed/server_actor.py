"""Ray actor of one server, which runs the requests of all its clients."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from agent_loop.distributed.messages import PackedError, ServerInfo
from agent_loop.distributed.partial_completions import PartialCompletions
from agent_loop.distributed.ray_module import enter_folder
from agent_loop.distributed.weights import PublishedWeights, WeightFetcher
from agent_loop.errors import AgentLoopError, ServerDied, ServerError
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.user_code import run_bounded
from agent_loop.servers.base import AsyncServerBase, ServerHealth
from agent_loop.servers.in_flight import InFlightRequest
from agent_loop.servers.reply_check import bad_reply
from agent_loop.servers.scores import TokenScores
from agent_loop.trajectory.attachments import Attachment
from agent_loop.trajectory.codec import encode_completion
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput

NOT_STARTED = "it has not started yet"
NUM_CALLS = 100_000
"""Concurrent calls. Completions wait in the engine, not in the actor's queue."""


@dataclass(slots=True, eq=False)
class _InFlightCompletion:
    client: str
    session: str
    task: asyncio.Task[bytes | PackedError]
    chunks: list[TokenChunk]
    """Chunks so far, if the server streams."""


class ServerActor:
    """Owns one `AsyncServerBase`. Calls of one client may arrive in any order.

    A process that Ray has restarted has no server: `ensure_started` creates it, with the weights of the others.
    """

    def __init__(self, make_server: Callable[[], AsyncServerBase], *, name: str, folder: str) -> None:
        """Create the actor without its server."""
        self._make_server = make_server
        self._name = name
        self._folder = folder
        self._server: AsyncServerBase | None = None
        """The server, once it has started and has the published weights."""
        self._fetcher = WeightFetcher()
        self._start_lock = asyncio.Lock()
        self._in_flight: dict[str, _InFlightCompletion] = {}
        self._sessions: defaultdict[str, set[str]] = defaultdict(set)
        """Sessions of each client."""
        self._cancelled_early: set[str] = set()
        """Ids of calls whose cancellation arrived before them."""
        self._dropped: set[str] = set()

    async def ensure_started(self, weights: PublishedWeights | None) -> ServerInfo:
        """Create and start the server if it has not started, and load the weights if it does not have them."""
        async with self._start_lock:
            server = self._server
            if server is None:
                enter_folder(self._folder)
                server = self._make_server()
                await server.start()
            health = await server.health()
            if weights is not None and health.weight_version != weights.weight_version:
                tensors = await self._fetcher.fetch(weights)
                await server.update_weights(tensors, weight_version=weights.weight_version)
            self._server = server
        return ServerInfo(server.name, server.abilities, server.max_concurrent)

    async def generate(
        self,
        client: str,
        call_id: str,
        session: str,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        attachments: Sequence[Attachment] = (),
    ) -> tuple[bytes | PackedError, int]:
        """Run a request on the server. Return its completion or its error, and the number of others' requests."""
        server = self._started
        if client in self._dropped:
            return self._error("it has dropped this client, which was reported dead", session), 0
        if call_id in self._cancelled_early:
            self._cancelled_early.discard(call_id)
            return self._error("the request was cancelled", session), 0
        self._sessions[client].add(session)
        request = InFlightRequest(sampling_params, prompt_ids, session, attachments)
        task = asyncio.create_task(_complete(request, server))
        self._in_flight[call_id] = _InFlightCompletion(client, session, task, request.chunks)
        try:
            await asyncio.wait({task})
        finally:
            del self._in_flight[call_id]
        response = self._error("the request was cancelled", session) if task.cancelled() else task.result()
        return response, self._num_others(client)

    async def cancel(self, call_id: str) -> None:
        """Cancel a request that its client no longer waits for. Return when it has ended."""
        completion = self._in_flight.get(call_id)
        if completion is None:
            self._cancelled_early.add(call_id)
        else:
            await _cancel([completion])

    async def end_session(self, client: str, session: str) -> None:
        """End a session, unless it has begun again."""
        if not any(completion.session == session for completion in self._in_flight.values()):
            self._sessions[client].discard(session)
            self._end_in_engine([session])

    async def score(self, token_ids: IntArray, start: int, top_logprobs: int) -> TokenScores:
        return await self._started.score(token_ids, start=start, top_logprobs=top_logprobs)

    async def partial_completions(self, num_known: Mapping[str, int]) -> PartialCompletions:
        """Return the new chunks of in-flight completions.

        Args:
            num_known: Number of chunks that the client knows, by call id.
        """
        partials: dict[str, tuple[int, bytes]] = {}
        for call_id, num_chunks in num_known.items():
            completion = self._in_flight.get(call_id)
            if completion is not None and len(completion.chunks) > num_chunks:
                new = TokenOutput.from_chunks(completion.chunks[num_chunks:])
                partials[call_id] = len(completion.chunks), encode_completion(new)
        return partials

    async def abort(self, session: str) -> None:
        await self._started.abort(session)

    async def drop_client(self, client: str) -> None:
        """End all sessions and requests of a client that died. The client cannot return."""
        self._dropped.add(client)
        await self._end_all_of(client)

    async def health(self, client: str) -> tuple[ServerHealth, int]:
        """Return the server's health, and its number of in-flight requests of other clients."""
        if self._server is None:
            health = ServerHealth(
                is_alive=False, num_running=0, num_waiting=0, weight_version=-1, detail=NOT_STARTED
            )
            return health, 0
        return await self._server.health(), self._num_others(client)

    async def wake_up(self) -> None:
        await self._started.wake_up()

    async def sleep(self) -> None:
        await self._started.sleep()

    async def update_weights(self, weights: PublishedWeights) -> None:
        tensors = await self._fetcher.fetch(weights)
        async with self._start_lock:
            await self._started.update_weights(tensors, weight_version=weights.weight_version)

    async def close(self) -> None:
        """End all sessions and requests, wait until the requests have ended, and close the server."""
        if self._server is not None:
            try:
                for client in list(self._sessions):
                    await self._end_all_of(client)
            finally:
                await self._server.close()

    async def inspect(self) -> dict[str, int]:
        """Return counts of what is held, for tests. All are zero if no client is served."""
        return {"running": len(self._in_flight), "sessions": sum(map(len, self._sessions.values()))}

    @property
    def _started(self) -> AsyncServerBase:
        if self._server is None:
            raise ServerDied(NOT_STARTED, server=self._name)
        return self._server

    def _num_others(self, client: str) -> int:
        return sum(completion.client != client for completion in self._in_flight.values())

    def _error(self, why: str, session: str) -> PackedError:
        return PackedError.pack(ServerError(why, server=self._name, request_id=session))

    async def _end_all_of(self, client: str) -> None:
        await _cancel(completion for completion in self._in_flight.values() if completion.client == client)
        self._end_in_engine(self._sessions.pop(client, ()))

    def _end_in_engine(self, sessions: Iterable[str]) -> None:
        for session in sessions:
            with suppress(ServerError):
                self._started.end_session(session)


async def _complete(request: InFlightRequest, server: AsyncServerBase) -> bytes | PackedError:
    try:
        output = await run_bounded(
            partial(request.sample_on, server), timeout_s=None, name=f"server {server.name!r}"
        )
    except AgentLoopError as error:
        if isinstance(error, ServerDied):
            error.chunks = request.chunks
        return PackedError.pack(error)
    except Exception as error:  # noqa: BLE001  (a bug of an engine fails this request at its client)
        why = f"it raised {describe_error(error)}"
        return PackedError.pack(bad_reply(why, server=server.name, request_id=request.session))
    return encode_completion(output)


async def _cancel(completions: Iterable[_InFlightCompletion]) -> None:
    tasks = [completion.task for completion in completions]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
