"""In-flight completions and sessions of the clients of one server. Everything here runs on one event loop."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from agent_loop.distributed.messages import PackedCompletion, PackedError
from agent_loop.distributed.partial_completions import PartialCompletions, pack_partial
from agent_loop.errors import AgentLoopError, ServerDied, ServerError
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.user_code import run_bounded
from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.in_flight import InFlightRequest
from agent_loop.servers.reply_check import bad_reply
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk


@dataclass(slots=True, eq=False)
class _InFlightCompletion:
    client: str
    session: str
    task: asyncio.Task[PackedCompletion | PackedError]
    chunks: list[TokenChunk]
    """Chunks so far, if the server streams."""


class ServerFrontend:
    """Runs the requests of all clients on one server.

    Calls of one client may arrive in any order.

    Args:
        server: The server, started.
    """

    def __init__(self, server: AsyncServerBase) -> None:
        self.server = server
        self._in_flight: dict[str, _InFlightCompletion] = {}
        self._sessions: defaultdict[str, set[str]] = defaultdict(set)
        """Sessions of each client."""
        self._cancelled_early: set[str] = set()
        """Ids of calls whose cancellation arrived before them."""
        self._dropped: set[str] = set()

    async def generate(
        self,
        client: str,
        call_id: str,
        *,
        session: str,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        attachments: Sequence[Attachment] = (),
    ) -> tuple[PackedCompletion | PackedError, int]:
        """Run a request on the server. Return its completion or its error, and the number of others' requests."""
        if client in self._dropped:
            return self._error("it has dropped this client, which was reported dead", session), 0
        if call_id in self._cancelled_early:
            self._cancelled_early.discard(call_id)
            return self._error("the request was cancelled", session), 0
        self._sessions[client].add(session)
        request = InFlightRequest(sampling_params, prompt_ids, session, attachments)
        task = asyncio.create_task(self._complete(request))
        self._in_flight[call_id] = _InFlightCompletion(client, session, task, request.chunks)
        try:
            await asyncio.wait({task})
        finally:
            del self._in_flight[call_id]
        response = self._error("the request was cancelled", session) if task.cancelled() else task.result()
        return response, self.num_others(client)

    async def cancel(self, call_id: str) -> None:
        """Cancel a request that its client no longer waits for. Return when it has ended."""
        completion = self._in_flight.get(call_id)
        if completion is None:
            self._cancelled_early.add(call_id)
        else:
            await _cancel([completion])

    def end_session(self, client: str, session: str) -> None:
        """End a session, unless it has begun again."""
        if not any(completion.session == session for completion in self._in_flight.values()):
            self._sessions[client].discard(session)
            self._end_in_engine([session])

    async def drop_client(self, client: str) -> None:
        """End all sessions and requests of a client that died. The client cannot return."""
        self._dropped.add(client)
        await self._end_all_of(client)

    async def close(self) -> None:
        """End all sessions and requests, and wait until the requests have ended."""
        for client in list(self._sessions):
            await self._end_all_of(client)

    def num_others(self, client: str) -> int:
        """Return the number of in-flight requests of other clients."""
        return sum(completion.client != client for completion in self._in_flight.values())

    def partial_completions(self, num_known: Mapping[str, int]) -> PartialCompletions:
        """Return the new chunks of in-flight completions.

        Args:
            num_known: Number of chunks that the client knows, by call id.
        """
        partials: dict[str, tuple[int, PackedCompletion]] = {}
        for call_id, num_chunks in num_known.items():
            completion = self._in_flight.get(call_id)
            if completion is not None and len(completion.chunks) > num_chunks:
                partials[call_id] = len(completion.chunks), pack_partial(completion.chunks[num_chunks:])
        return partials

    def inspect(self) -> dict[str, int]:
        """Return counts of what is held. All are zero if no client is served."""
        return {
            "running": len(self._in_flight),
            "sessions": sum(map(len, self._sessions.values())),
        }

    async def _complete(self, request: InFlightRequest) -> PackedCompletion | PackedError:
        sample, name = partial(request.sample_on, self.server), f"server {self.server.name!r}"
        try:
            output = await run_bounded(sample, timeout_s=None, name=name)
        except AgentLoopError as error:
            if isinstance(error, ServerDied):
                error.chunks = request.chunks
            return PackedError.pack(error)
        except Exception as error:  # noqa: BLE001  (a bug of an engine fails this request at its client)
            why = f"it raised {describe_error(error)}"
            return PackedError.pack(bad_reply(why, server=self.server.name, request_id=request.session))
        return PackedCompletion.pack(output)

    def _error(self, why: str, session: str) -> PackedError:
        return PackedError.pack(ServerError(why, server=self.server.name, request_id=session))

    async def _end_all_of(self, client: str) -> None:
        await _cancel(completion for completion in self._in_flight.values() if completion.client == client)
        self._end_in_engine(self._sessions.pop(client, ()))

    def _end_in_engine(self, sessions: Iterable[str]) -> None:
        for session in sessions:
            with suppress(ServerError):
                self.server.end_session(session)


async def _cancel(completions: Iterable[_InFlightCompletion]) -> None:
    tasks = [completion.task for completion in completions]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
