"""The client of all servers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from agent_loop.attachments import Attachment
from agent_loop.boundary import DeadlineExpired, run_bounded
from agent_loop.concurrency import run_shielded, run_together
from agent_loop.errors import ServerTimeout
from agent_loop.servers.balancer import LoadBalancer
from agent_loop.servers.base import AsyncServerBase, ServerHealth
from agent_loop.types import SamplingParams, TokenIds, TokenOutput, as_token_ids

if TYPE_CHECKING:
    import torch

END_SESSIONS_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 60.0


class AsyncLLMServerManager:
    """Sends each request to one of several servers: load-balanced, sticky per session.

    Loops get one that is scoped to their trajectory: the sessions they begin end with it.
    """

    def __init__(
        self,
        servers: Sequence[AsyncServerBase],
        *,
        balancer: LoadBalancer | None = None,
        request_timeout_s: float | None = None,
    ) -> None:
        """Args: request_timeout_s: A completion that takes longer is aborted and fails; None waits for ever."""
        self._servers = list(servers)
        self._balancer = balancer or LoadBalancer(len(servers))
        self._request_timeout_s = request_timeout_s
        self._sessions: set[str] = set()

    @property
    def balancer(self) -> LoadBalancer:
        return self._balancer

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: TokenIds,
        sampling_params: Mapping[str, Any] | SamplingParams,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        """Samples one completion.

        Args:
            request_id: The session. Later turns with the same id go to the same server, which still has its prefix.
            prompt_ids: The whole context so far, shape [num_tokens].
            sampling_params: See `SamplingParams`.
            attachments: Everything attached to the context, counted from its first token, in order.

        Raises:
            SamplingParamsError: A parameter is unknown or out of range.
            ServerError: The server failed, or took longer than the time limit.
        """
        params = SamplingParams.parse(sampling_params)
        ids = as_token_ids(prompt_ids)
        self._sessions.add(request_id)
        with self._balancer.lease(request_id) as index:
            server = self._servers[index]
            # A server that knows of no attachments need not take the argument.
            more: dict[str, Any] = {"attachments": attachments} if attachments else {}
            try:
                return await run_bounded(
                    partial(server.generate, ids, params, request_id, **more),
                    timeout_s=self._request_timeout_s,
                )
            except DeadlineExpired as error:
                raise ServerTimeout(
                    f"the completion {error}; raise rollout.request_timeout_s, or see what holds the server up",
                    server=server.name,
                    request_id=request_id,
                ) from None

    async def start(self) -> None:
        """Brings all engines up.

        Raises:
            ServerError: One did not come up; the others are closed again.
        """
        try:
            await run_together(server.start() for server in self._servers)
        except BaseException:
            await run_shielded(self.close, timeout_s=CLOSE_TIMEOUT_S)
            raise

    async def abort(self, request_id: str) -> None:
        """Ends the running completion of a session early; its `generate` returns the tokens so far."""
        index = self._balancer.server_of(request_id)
        if index is not None:
            await self._servers[index].abort(request_id)

    async def end_session(self, request_id: str) -> None:
        """Tells that no turn of this session will follow."""
        self._sessions.discard(request_id)
        index = self._balancer.end_session(request_id)
        if index is not None:
            await self._servers[index].end_session(request_id)

    @asynccontextmanager
    async def scope(self) -> AsyncGenerator[AsyncLLMServerManager]:
        """A manager on the same servers and balancer, whose sessions end when the scope does."""
        scoped = AsyncLLMServerManager(
            self._servers, balancer=self._balancer, request_timeout_s=self._request_timeout_s
        )
        try:
            yield scoped
        finally:
            if scoped._sessions:
                await run_shielded(scoped._end_sessions, timeout_s=END_SESSIONS_TIMEOUT_S)

    async def wake_up(self) -> None:
        """Makes all servers ready to generate."""
        await run_together(server.wake_up() for server in self._servers)

    async def sleep(self) -> None:
        """Frees the KV caches of all servers and gives their devices to the trainer."""
        await run_together(server.sleep() for server in self._servers)

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        """Replaces the weights of all servers."""
        tensors = list(weights)
        await run_together(
            server.update_weights(tensors, weight_version=weight_version) for server in self._servers
        )

    async def health(self) -> list[ServerHealth]:
        """The health of each server."""
        return await run_together(server.health() for server in self._servers)

    async def close(self) -> None:
        """Ends all servers."""
        await run_together(server.close() for server in self._servers)

    async def _end_sessions(self) -> None:
        for request_id in list(self._sessions):
            await self.end_session(request_id)
