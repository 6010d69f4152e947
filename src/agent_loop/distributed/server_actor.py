"""Ray actor of one server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from agent_loop.config import RolloutConfig
from agent_loop.distributed.messages import PackedCompletion, PackedError, ServerInfo
from agent_loop.distributed.partial_completions import PartialCompletions
from agent_loop.distributed.ray_module import enter_folder
from agent_loop.distributed.server_frontend import ServerFrontend
from agent_loop.distributed.weights import PublishedWeights, WeightFetcher
from agent_loop.errors import ServerDied
from agent_loop.servers.base import ServerHealth, ServerSpec
from agent_loop.servers.factory import create_server, find_server_class
from agent_loop.servers.scores import TokenScores
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams

NOT_STARTED = "it has not started yet"
NUM_CALLS = 100_000
"""Concurrent calls. Completions wait in the engine, not in the actor's queue."""


class ServerActor:
    """Owns one `AsyncServerBase`.

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
        self._start_lock = asyncio.Lock()

    async def ensure_started(self, weights: PublishedWeights | None) -> ServerInfo:
        """Create and start the server if it has not started, and load the weights if it does not have them."""
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

    async def generate(
        self,
        client: str,
        call_id: str,
        session: str,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        attachments: tuple[Attachment, ...],
    ) -> tuple[PackedCompletion | PackedError, int]:
        """Run a request. See `ServerFrontend.generate`."""
        return await self._started.generate(
            client,
            call_id,
            session=session,
            prompt_ids=prompt_ids,
            sampling_params=sampling_params,
            attachments=attachments,
        )

    async def cancel(self, call_id: str) -> None:
        await self._started.cancel(call_id)

    async def end_session(self, client: str, session: str) -> None:
        self._started.end_session(client, session)

    async def score(self, token_ids: IntArray, start: int, top_logprobs: int) -> TokenScores:
        """Return the scores of a text. See `AsyncServerBase.score`.

        Raises:
            AgentLoopError: The server refused the text, or failed.
        """
        return await self._started.server.score(token_ids, start=start, top_logprobs=top_logprobs)

    async def partial_completions(self, num_known: Mapping[str, int]) -> PartialCompletions:
        """Return the new chunks of in-flight completions. See `ServerFrontend.partial_completions`."""
        return self._started.partial_completions(num_known)

    async def abort(self, session: str) -> None:
        await self._started.server.abort(session)

    async def drop_client(self, client: str) -> None:
        """End all sessions and requests of a client that died."""
        await self._started.drop_client(client)

    async def health(self, client: str) -> tuple[ServerHealth, int]:
        """Return the server's health, and its number of in-flight requests of other clients."""
        if self._frontend is None:
            health = ServerHealth(
                is_alive=False, num_running=0, num_waiting=0, weight_version=-1, detail=NOT_STARTED
            )
            return health, 0
        return await self._frontend.server.health(), self._frontend.num_others(client)

    async def wake_up(self) -> None:
        await self._started.server.wake_up()

    async def sleep(self) -> None:
        await self._started.server.sleep()

    async def update_weights(self, weights: PublishedWeights) -> None:
        tensors = await self._fetcher.fetch(weights)
        async with self._start_lock:
            await self._started.server.update_weights(tensors, weight_version=weights.weight_version)

    async def close(self) -> None:
        if self._frontend is not None:
            try:
                await self._frontend.close()
            finally:
                await self._frontend.server.close()

    async def inspect(self) -> dict[str, int]:
        """Return counts of what is held, for tests. All are zero if no client is served."""
        return {} if self._frontend is None else self._frontend.inspect()

    @property
    def _started(self) -> ServerFrontend:
        if self._frontend is None:
            raise ServerDied(NOT_STARTED, server=self._spec.name)
        return self._frontend
