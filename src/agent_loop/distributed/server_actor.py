"""Ray actor of one server."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from agent_loop.config import RolloutConfig
from agent_loop.distributed.messages import ChannelLost, ServerInfo
from agent_loop.distributed.partial_completions import PartialCompletions
from agent_loop.distributed.ray_module import enter_folder
from agent_loop.distributed.server_frontend import ServerFrontend
from agent_loop.distributed.weights import PublishedWeights, WeightFetcher
from agent_loop.errors import ServerDied
from agent_loop.servers.base import ServerHealth, ServerSpec
from agent_loop.servers.factory import create_server, find_server_class
from agent_loop.servers.scores import TokenScores
from agent_loop.types import IntArray

ResultT = TypeVar("ResultT")

CONTROL_GROUP = "control"
"""Ray concurrency group with a queue and a thread of its own, so that control calls do not wait for completions."""
NOT_STARTED = "it has not started yet"
NUM_CONTROL_CALLS = 256
NUM_COMPLETIONS = 100_000
"""Concurrent calls. Completions wait in the engine or in the clients' channels, not in the actor's queue."""


class ServerActor:
    """Owns one `AsyncServerBase`, whose methods are all called on the event loop of the default concurrency group.

    A process that Ray has restarted has no server: `ensure_started` creates it, with the weights of the others.
    """

    def __init__(self, spec: ServerSpec, *, rollout: RolloutConfig, folder: str) -> None:
        """Create the actor without its server.

        Args:
            spec: What the server is created from.
            rollout: Names the server's class.
            folder: Working directory of the driver.
        """
        self._spec = spec
        self._folder = folder
        self._rollout = rollout
        self._frontend: ServerFrontend | None = None
        self._fetcher = WeightFetcher()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start_lock = asyncio.Lock()

    # -- the default group -----------------------------------------------------------------------------------------

    async def ensure_started(self, weights: PublishedWeights | None) -> ServerInfo:
        """Create and start the server if it has not started, and load the weights if it does not have them.

        Raises:
            AgentLoopError: The server does not start.
        """
        self._loop = asyncio.get_running_loop()
        async with self._start_lock:
            if self._frontend is not None:
                server = self._frontend.server
            else:
                enter_folder(self._folder)
                server = create_server(find_server_class(self._rollout), self._spec)
                await server.start()
            health = await server.health()
            if weights is not None and health.weight_version != weights.weight_version:
                tensors = await self._fetcher.fetch(weights)
                await server.update_weights(tensors, weight_version=weights.weight_version)
            self._frontend = self._frontend or ServerFrontend(server)
        return ServerInfo(server.name, server.abilities, server.max_concurrent)

    async def open_channel(self, client: str) -> str:
        """Open a channel and return its name. The client's earlier channel, sessions and requests end.

        Raises:
            ChannelLost: The server has not started, or the client was dropped.
        """
        if self._frontend is None:
            raise ChannelLost(NOT_STARTED)
        return await self._frontend.open_channel(client)

    async def exchange(self, packed: bytes) -> bytes:
        """Accept a packed `RequestBatch`, and return a packed `ResponseBatch` once there are responses.

        Raises:
            ChannelLost: The channel is closed.
        """
        if self._frontend is None:
            raise ChannelLost(NOT_STARTED)
        return pickle.dumps(await self._frontend.exchange(pickle.loads(packed)), protocol=5)

    async def score(self, token_ids: IntArray, start: int, top_logprobs: int) -> TokenScores:
        """Return the scores of a text. See `AsyncServerBase.score`.

        Raises:
            AgentLoopError: The server refused the text, or failed.
        """
        return await self._started.server.score(token_ids, start=start, top_logprobs=top_logprobs)

    # -- the control group -----------------------------------------------------------------------------------------

    async def partial_completions(self, client: str, num_known: Mapping[int, int]) -> PartialCompletions:
        """Return the new chunks of a client's in-flight completions. See `ServerFrontend.partial_completions`."""

        async def on_loop() -> PartialCompletions:
            return self._started.partial_completions(client, num_known)

        return await self._run_on_loop(on_loop)

    async def abort(self, session: str) -> None:
        await self._run_on_loop(lambda: self._started.server.abort(session))

    async def drop_client(self, client: str) -> None:
        """End all channels, sessions and requests of a client that died."""

        await self._run_on_loop(lambda: self._started.drop_client(client))

    async def health(self, client: str) -> tuple[ServerHealth, int]:
        """Return the server's health, and its number of in-flight requests of other clients."""
        if self._frontend is None:
            health = ServerHealth(
                is_alive=False, num_running=0, num_waiting=0, weight_version=-1, detail=NOT_STARTED
            )
            return health, 0
        return await self._run_on_loop(lambda: self._started.server.health()), self._frontend.num_others(
            client
        )

    async def wake_up(self) -> None:
        await self._run_on_loop(lambda: self._started.server.wake_up())

    async def sleep(self) -> None:
        await self._run_on_loop(lambda: self._started.server.sleep())

    async def update_weights(self, weights: PublishedWeights) -> None:
        async def on_loop() -> None:
            async with self._start_lock:
                await self._started.server.update_weights(tensors, weight_version=weights.weight_version)

        tensors = await self._fetcher.fetch(weights)
        await self._run_on_loop(on_loop)

    async def close(self) -> None:
        async def on_loop() -> None:
            try:
                await self._started.close()
            finally:
                await self._started.server.close()

        if self._frontend is not None:
            await self._run_on_loop(on_loop)

    async def inspect(self) -> dict[str, int]:
        """Return counts of what is held, for tests. All are zero if no client is served."""
        return {} if self._frontend is None else self._frontend.inspect()

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _started(self) -> ServerFrontend:
        if self._frontend is None:
            raise ServerDied(NOT_STARTED, server=self._spec.name)
        return self._frontend

    async def _run_on_loop(self, call: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Run a call on the event loop that the server belongs to."""
        if self._loop is None:
            raise ServerDied(NOT_STARTED, server=self._spec.name)
        if self._loop is asyncio.get_running_loop():
            return await call()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_await_call(call), self._loop))


async def _await_call(call: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
    return await call()
