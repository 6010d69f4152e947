"""Clients of one server: channels, contexts and in-flight completions. All of it belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from agent_loop.distributed.contexts import ReceivedContexts, UnknownContext, token_bytes
from agent_loop.distributed.messages import (
    ChannelLost,
    ContextMissing,
    GenerationRequest,
    PackedCompletion,
    PackedError,
    RequestBatch,
    Response,
    ResponseBatch,
)
from agent_loop.distributed.partial_completions import PartialCompletions, pack_partial
from agent_loop.distributed.server_channel import ServerChannel
from agent_loop.errors import AgentLoopError, ServerDied, ServerError
from agent_loop.runtime.background_tasks import BackgroundTasks
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.user_code import run_bounded
from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.servers.in_flight import InFlightRequest
from agent_loop.servers.reply_check import bad_reply
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, TokenChunk


@dataclass(slots=True, eq=False)
class _InFlightCompletion:
    channel: ServerChannel
    call_id: int
    task: asyncio.Task[Response]
    chunks: list[TokenChunk]
    """Chunks so far, if the server streams."""
    is_wanted: bool = True
    """Whether the client still waits for the response."""


class ServerFrontend:
    """Runs the requests of all clients on one server.

    Args:
        server: The server, started.
    """

    def __init__(self, server: AsyncServerBase) -> None:
        self.server = server
        self._contexts = ReceivedContexts()
        self._channels: dict[str, ServerChannel] = {}
        self._in_flight: dict[tuple[str, int], _InFlightCompletion] = {}
        self._num_in_flight_of: Counter[str] = Counter()
        self._dropped: set[str] = set()
        self._tasks = BackgroundTasks()

    async def open_channel(self, client: str) -> str:
        """Open a channel and return its name. The client's earlier channel, sessions and requests end.

        Raises:
            ChannelLost: The client was dropped.
        """
        if client in self._dropped:
            raise ChannelLost("it has dropped this client, which was reported dead")
        self._end_all_of(client)
        name = uuid4().hex
        self._channels[name] = ServerChannel(client, on_batch=self._process)
        return name

    async def exchange(self, batch: RequestBatch) -> ResponseBatch:
        """Accept a batch of requests, and return responses once there are some.

        Raises:
            ChannelLost: The channel is closed.
        """
        channel = self._channels.get(batch.channel)
        if channel is None:
            raise ChannelLost("it was restarted")
        responses = await channel.exchange(batch)
        return ResponseBatch(responses, self.num_others(channel.client))

    async def drop_client(self, client: str) -> None:
        """End all channels, sessions and requests of a client that died. The client cannot return."""
        self._dropped.add(client)
        self._end_all_of(client)

    async def close(self) -> None:
        """End all channels, sessions and requests, and wait until the requests have ended."""
        for client in {channel.client for channel in self._channels.values()}:
            self._end_all_of(client)
        await self._tasks.close()

    def num_others(self, client: str) -> int:
        """Return the number of in-flight requests of other clients."""
        return len(self._in_flight) - self._num_in_flight_of[client]

    def partial_completions(self, client: str, num_known: Mapping[int, int]) -> PartialCompletions:
        """Return the new chunks of a client's in-flight completions.

        Args:
            num_known: Number of chunks that the client knows, by call id.
        """
        partials: dict[int, tuple[int, PackedCompletion]] = {}
        for call_id, num_chunks in num_known.items():
            completion = self._in_flight.get((client, call_id))
            if completion is not None and len(completion.chunks) > num_chunks:
                partials[call_id] = len(completion.chunks), pack_partial(completion.chunks[num_chunks:])
        return partials

    def inspect(self) -> dict[str, int]:
        """Return counts of what is held. All are zero if no client is served."""
        return {
            "contexts": len(self._contexts),
            "running": len(self._in_flight),
            "clients": sum(self._num_in_flight_of.values()),
            "exchanges": sum(channel.num_pending for channel in self._channels.values()),
        }

    def _process(self, channel: ServerChannel, batch: RequestBatch) -> None:
        for call_id in batch.cancelled:
            completion = self._in_flight.get((channel.client, call_id))
            if completion is not None:
                self._cancel(completion)
        for session in batch.ended:
            self._contexts.end(session)
        if batch.ended:
            # Later, after the completions that were just cancelled have processed the cancellation.
            asyncio.get_running_loop().call_soon(self._end_in_engine, batch.ended)
        for request in batch.requests:
            self._begin(channel, request)

    def _begin(self, channel: ServerChannel, request: GenerationRequest) -> None:
        try:
            prompt_ids, attachments = self._contexts.extend(
                request.session, request.context, client=channel.client
            )
        except UnknownContext:
            channel.respond(request.call_id, ContextMissing())
            return
        chunks: list[TokenChunk] = []
        task = self._tasks.start(self._complete(request, prompt_ids, attachments, chunks=chunks))
        completion = _InFlightCompletion(channel, request.call_id, task, chunks)
        self._in_flight[channel.client, request.call_id] = completion
        self._num_in_flight_of[channel.client] += 1
        task.add_done_callback(partial(self._after_completion, completion))

    async def _complete(
        self,
        request: GenerationRequest,
        prompt_ids: IntArray,
        attachments: tuple[Attachment, ...],
        *,
        chunks: list[TokenChunk],
    ) -> Response:
        """Run a request on the server, and return its completion or its error.

        Args:
            chunks: List that the chunks are appended to as they come.
        """
        in_flight = InFlightRequest(
            request.sampling_params, prompt_ids, request.session, attachments, on_chunk=chunks.append
        )
        streams = Ability.STREAMING in self.server.abilities
        sample = in_flight.stream_from if streams else in_flight.generate_from
        name = f"server {self.server.name!r}"
        try:
            output = await run_bounded(partial(sample, self.server), timeout_s=None, name=name)
        except AgentLoopError as error:
            if isinstance(error, ServerDied):
                error.chunks = chunks
            return PackedError.pack(error)
        except Exception as error:  # noqa: BLE001  (a bug of an engine fails this request at its client)
            why = f"it raised {describe_error(error)}"
            return PackedError.pack(bad_reply(why, server=self.server.name, request_id=request.session))
        self._contexts.append(request.session, token_bytes(output.token_ids))
        return PackedCompletion.pack(output)

    def _after_completion(self, completion: _InFlightCompletion, task: asyncio.Task[Response]) -> None:
        client = completion.channel.client
        del self._in_flight[client, completion.call_id]
        self._num_in_flight_of[client] -= 1
        if completion.is_wanted:
            is_cancelled = task.cancelled()
            response = self._pack_error("the engine cancelled it") if is_cancelled else task.result()
            completion.channel.respond(completion.call_id, response)

    def _cancel(self, completion: _InFlightCompletion) -> None:
        """Cancel a completion that its client no longer waits for."""
        if completion.is_wanted:
            completion.is_wanted = False
            completion.task.cancel()
            completion.channel.give_up(completion.call_id)

    def _pack_error(self, why: str, session: str = "") -> PackedError:
        return PackedError.pack(ServerError(why, server=self.server.name, request_id=session))

    def _end_all_of(self, client: str) -> None:
        for completion in list(self._in_flight.values()):
            if completion.channel.client == client:
                self._cancel(completion)
        for name in [name for name, channel in self._channels.items() if channel.client == client]:
            self._channels.pop(name).close()
        sessions = self._contexts.sessions_of(client)
        self._contexts.drop_client(client)
        self._end_in_engine(sessions)

    def _end_in_engine(self, sessions: Sequence[str]) -> None:
        for session in sessions:
            with suppress(ServerError):
                self.server.end_session(session)
