"""A server in a process of its own: what runs inside its Ray actor."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agent_loop.boundary import describe_error
from agent_loop.config import RolloutConfig
from agent_loop.distributed.contexts import HeldContexts, UnknownContext
from agent_loop.distributed.progress import Parts, pack_unfinished
from agent_loop.distributed.ray_module import enter_folder
from agent_loop.distributed.weights import PublishedWeights, fetch_weights
from agent_loop.distributed.wire import Answer, Ask, Cancelled, Refusal, Resend, ServerFacts
from agent_loop.errors import AgentLoopError, ServerDied, ServerError
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth, ServerSpec
from agent_loop.servers.factory import create_server, server_class_of
from agent_loop.types import TokenChunk, TokenOutput

ResultT = TypeVar("ResultT")

CONTROL_GROUP = "control"
"""Calls of this group have a queue and a thread of their own, so that they are heard however many completions wait."""
NUM_CONTROL_CALLS = 256
NUM_COMPLETIONS = 100_000
"""At once. Completions wait in the engine or in the clients' lines, not in the actor's queue."""
NUM_EARLY_CANCELS = 10_000


@dataclass(slots=True)
class _Running:
    client: str
    scope: asyncio.Timeout
    chunks: list[TokenChunk] = field(default_factory=list[TokenChunk])
    """What it has so far, where the server tells."""


class ServerActor:
    """Owns one `AsyncServerBase`, whose methods are all called on the event loop of the completions' group.

    A process that Ray has started again is empty: `come_up` makes the server, with the weights of the others.
    """

    def __init__(self, spec: ServerSpec, *, rollout: RolloutConfig, folder: str) -> None:
        """Args: folder: Where the driver was started."""
        self._spec = spec
        self._folder = folder
        self._rollout = rollout
        self._server: AsyncServerBase | None = None
        self._trouble = "it is not up yet"
        self._home: asyncio.AbstractEventLoop | None = None
        self._coming_up = asyncio.Lock()
        self._contexts = HeldContexts()
        self._running: dict[tuple[str, int], _Running] = {}
        self._num_running_of: Counter[str] = Counter()
        self._cancelled_early: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._dropped: set[str] = set()

    # -- the completions' group ------------------------------------------------------------------------------------

    async def come_up(self, weights: PublishedWeights | None) -> ServerFacts:
        """Makes and starts the server unless it is up, and gives it the weights unless it has them.

        Raises:
            AgentLoopError: It does not come up.
        """
        self._home = asyncio.get_running_loop()
        async with self._coming_up:
            server = self._server
            if server is None:
                enter_folder(self._folder)
                server = create_server(server_class_of(self._rollout), self._spec)
                await server.start()
            health = await server.health()
            if weights is not None and health.weight_version != weights.weight_version:
                await server.update_weights(
                    await fetch_weights(weights), weight_version=weights.weight_version
                )
            self._server = server
        return ServerFacts(server.name, server.abilities, server.max_concurrent)

    async def generate(self, client: str, ask: Ask) -> Answer | Refusal | Resend | Cancelled:
        """A completion, or why there is none."""
        key = (client, ask.call)
        if self._server is None:
            return Refusal(ServerDied(self._trouble, server=self._spec.name, request_id=ask.session))
        if client in self._dropped or key in self._cancelled_early:
            self._cancelled_early.pop(key, None)
            return Cancelled()
        try:
            prompt_ids, attachments = self._contexts.extend(ask.session, ask.delta, client=client)
        except UnknownContext:
            return Resend()
        more: dict[str, Any] = {"attachments": attachments} if attachments else {}
        scope = asyncio.timeout(None)
        running = self._running[key] = _Running(client, scope)
        self._num_running_of[client] += 1
        try:
            async with scope:
                if Ability.STREAMING in self._server.abilities:
                    chunks = self._server.stream(prompt_ids, ask.sampling_params, ask.session, **more)
                    output = await _gathered(chunks, into=running.chunks)
                else:
                    output = await self._server.generate(prompt_ids, ask.sampling_params, ask.session, **more)
        except AgentLoopError as error:
            if isinstance(error, ServerDied):
                error.chunks = running.chunks
            return Refusal(error)
        except Exception as error:  # noqa: BLE001  (an engine's bug fails this completion, at the client)
            if scope.expired():
                return Cancelled()
            return Refusal(ServerError(describe_error(error), server=self._spec.name, request_id=ask.session))
        finally:
            del self._running[key]
            self._num_running_of.subtract([client])
        answer = Answer.pack(output, num_others=self._num_others(client))
        self._contexts.append(ask.session, answer.token_ids)
        return answer

    # -- the control group -----------------------------------------------------------------------------------------

    async def cancel(self, client: str, call: int) -> None:
        """Ends a completion that nobody waits for any more; one that comes later does not begin."""

        async def at_home() -> None:
            key = (client, call)
            running = self._running.get(key)
            if running is None:
                self._cancelled_early[key] = None
                if len(self._cancelled_early) > NUM_EARLY_CANCELS:
                    self._cancelled_early.popitem(last=False)
            else:
                _expire(running.scope)

        await self._go_home(at_home)

    async def parts(self, client: str, num_known: Mapping[int, int]) -> Parts:
        """What a client's running completions have beyond the chunks of each that it knows."""

        async def at_home() -> Parts:
            parts: dict[int, tuple[int, Answer]] = {}
            for call, num_chunks in num_known.items():
                running = self._running.get((client, call))
                if running is not None and len(running.chunks) > num_chunks:
                    new = pack_unfinished(running.chunks[num_chunks:])
                    parts[call] = (len(running.chunks), new)
            return parts

        return await self._go_home(at_home)

    async def abort(self, session: str) -> None:
        await self._go_home(lambda: self._up.abort(session))

    async def end_sessions(self, sessions: tuple[str, ...]) -> None:
        await self._go_home(lambda: self._end_sessions(sessions))

    async def drop_client(self, client: str) -> None:
        """Ends whatever a client that died had here."""

        async def at_home() -> None:
            for running in list(self._running.values()):
                if running.client == client:
                    _expire(running.scope)
            await self._end_sessions(self._contexts.sessions_of(client))
            self._contexts.drop_client(client)
            self._dropped.add(client)

        await self._go_home(at_home)

    async def health(self, client: str) -> tuple[ServerHealth, int]:
        """How it is, and how many requests of others it has."""
        if self._server is None:
            health = ServerHealth(
                is_alive=False, num_running=0, num_waiting=0, weight_version=-1, detail=self._trouble
            )
            return health, 0
        return await self._go_home(lambda: self._up.health()), self._num_others(client)

    async def wake_up(self) -> None:
        await self._go_home(lambda: self._up.wake_up())

    async def sleep(self) -> None:
        await self._go_home(lambda: self._up.sleep())

    async def update_weights(self, weights: PublishedWeights) -> None:
        async def at_home() -> None:
            async with self._coming_up:
                await self._up.update_weights(tensors, weight_version=weights.weight_version)

        tensors = await fetch_weights(weights)
        await self._go_home(at_home)

    async def close(self) -> None:
        if self._server is not None:
            await self._go_home(lambda: self._up.close())

    async def inspect(self) -> dict[str, int]:
        """What is held, for tests: all zero when nobody is served."""
        return {
            "contexts": len(self._contexts),
            "running": len(self._running),
            "clients": sum(self._num_running_of.values()),
        }

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _up(self) -> AsyncServerBase:
        if self._server is None:
            raise ServerDied(self._trouble, server=self._spec.name)
        return self._server

    async def _go_home(self, call: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Runs a call on the loop that the server belongs to."""
        if self._home is None:
            raise ServerDied(self._trouble, server=self._spec.name)
        if self._home is asyncio.get_running_loop():
            return await call()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_called(call), self._home))

    async def _end_sessions(self, sessions: tuple[str, ...]) -> None:
        for session in sessions:
            self._contexts.end(session)
            with suppress(ServerError):
                await self._up.end_session(session)

    def _num_others(self, client: str) -> int:
        return len(self._running) - self._num_running_of[client]


async def _called(call: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
    return await call()


async def _gathered(chunks: AsyncGenerator[TokenChunk], *, into: list[TokenChunk]) -> TokenOutput:
    async with aclosing(chunks):
        async for chunk in chunks:
            into.append(chunk)  # noqa: PERF401  (others read it meanwhile)
    return TokenOutput.from_chunks(into)


def _expire(scope: asyncio.Timeout) -> None:
    with suppress(RuntimeError):  # it is over already
        scope.reschedule(asyncio.get_running_loop().time())
