"""A server in a process of its own: what runs inside its Ray actor."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from agent_loop.config import RolloutConfig
from agent_loop.distributed.progress import Parts
from agent_loop.distributed.ray_module import enter_folder
from agent_loop.distributed.serving import Serving
from agent_loop.distributed.weights import PublishedWeights, WeightFetcher
from agent_loop.distributed.wire import LineLost, ServerFacts
from agent_loop.errors import ServerDied
from agent_loop.servers.base import ServerHealth, ServerSpec
from agent_loop.servers.factory import create_server, server_class_of

ResultT = TypeVar("ResultT")

CONTROL_GROUP = "control"
"""Calls of this group have a queue and a thread of their own, so that they are heard however many completions wait."""
NUM_CONTROL_CALLS = 256
NUM_COMPLETIONS = 100_000
"""At once. Completions wait in the engine or in the clients' lines, not in the actor's queue."""


class ServerActor:
    """Owns one `AsyncServerBase`, whose methods are all called on the event loop of the completions' group.

    A process that Ray has started again is empty: `come_up` makes the server, with the weights of the others.
    """

    def __init__(self, spec: ServerSpec, *, rollout: RolloutConfig, folder: str) -> None:
        """Args: folder: Where the driver was started."""
        self._spec = spec
        self._folder = folder
        self._rollout = rollout
        self._serving: Serving | None = None
        self._fetcher = WeightFetcher()
        self._trouble = "it is not up yet"
        self._home: asyncio.AbstractEventLoop | None = None
        self._coming_up = asyncio.Lock()

    # -- the completions' group ------------------------------------------------------------------------------------

    async def come_up(self, weights: PublishedWeights | None) -> ServerFacts:
        """Makes and starts the server unless it is up, and gives it the weights unless it has them.

        Raises:
            AgentLoopError: It does not come up.
        """
        self._home = asyncio.get_running_loop()
        async with self._coming_up:
            if self._serving is not None:
                server = self._serving.server
            else:
                enter_folder(self._folder)
                server = create_server(server_class_of(self._rollout), self._spec)
                await server.start()
            health = await server.health()
            if weights is not None and health.weight_version != weights.weight_version:
                tensors = await self._fetcher.fetch(weights)
                await server.update_weights(tensors, weight_version=weights.weight_version)
            self._serving = self._serving or Serving(server)
        return ServerFacts(server.name, server.abilities, server.max_concurrent)

    async def open_line(self, client: str) -> str:
        """Begins anew with a client, whose earlier line ends with all it had here. Gives the line's name.

        Raises:
            LineLost: The server is not up, or the client was given up.
        """
        if self._serving is None:
            raise LineLost(self._trouble)
        return await self._serving.open_line(client)

    async def exchange(self, packed: bytes) -> bytes:
        """Takes a `Post`, holds it until there are answers, and gives a `Reply`.

        Raises:
            LineLost: There is no such line any more.
        """
        if self._serving is None:
            raise LineLost(self._trouble)
        return pickle.dumps(await self._serving.exchange(pickle.loads(packed)), protocol=5)

    # -- the control group -----------------------------------------------------------------------------------------

    async def parts(self, client: str, num_known: Mapping[int, int]) -> Parts:
        """What a client's running completions have beyond the chunks of each that it knows."""

        async def at_home() -> Parts:
            return self._up.parts(client, num_known)

        return await self._go_home(at_home)

    async def abort(self, session: str) -> None:
        await self._go_home(lambda: self._up.server.abort(session))

    async def drop_client(self, client: str) -> None:
        """Ends whatever a client that died had here."""

        await self._go_home(lambda: self._up.drop_client(client))

    async def health(self, client: str) -> tuple[ServerHealth, int]:
        """How it is, and how many requests of others it has."""
        if self._serving is None:
            health = ServerHealth(
                is_alive=False, num_running=0, num_waiting=0, weight_version=-1, detail=self._trouble
            )
            return health, 0
        return await self._go_home(lambda: self._up.server.health()), self._serving.num_others(client)

    async def wake_up(self) -> None:
        await self._go_home(lambda: self._up.server.wake_up())

    async def sleep(self) -> None:
        await self._go_home(lambda: self._up.server.sleep())

    async def update_weights(self, weights: PublishedWeights) -> None:
        async def at_home() -> None:
            async with self._coming_up:
                await self._up.server.update_weights(tensors, weight_version=weights.weight_version)

        tensors = await self._fetcher.fetch(weights)
        await self._go_home(at_home)

    async def close(self) -> None:
        if self._serving is not None:
            await self._go_home(lambda: self._up.server.close())

    async def inspect(self) -> dict[str, int]:
        """What is held, for tests: all zero when nobody is served."""
        return {} if self._serving is None else self._serving.inspect()

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _up(self) -> Serving:
        if self._serving is None:
            raise ServerDied(self._trouble, server=self._spec.name)
        return self._serving

    async def _go_home(self, call: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Runs a call on the loop that the server belongs to."""
        if self._home is None:
            raise ServerDied(self._trouble, server=self._spec.name)
        if self._home is asyncio.get_running_loop():
            return await call()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_called(call), self._home))


async def _called(call: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
    return await call()
