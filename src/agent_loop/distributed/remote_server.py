"""Clients of servers in other processes, for workers and for the driver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from agent_loop.distributed.messages import PackedError, ServerInfo
from agent_loop.distributed.partial_completions import PartialCompletionPoller, PartialCompletions
from agent_loop.distributed.ray_module import ActorLost, await_result, load_ray
from agent_loop.distributed.weights import PublishedWeights, WeightStore
from agent_loop.errors import AgentLoopError, ServerDied, ServerError, ServerTimeout
from agent_loop.runtime.concurrency import BackgroundTasks, run_shielded
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth
from agent_loop.servers.scores import TokenScores
from agent_loop.trajectory.attachments import Attachment
from agent_loop.trajectory.codec import decode_completion
from agent_loop.types import IntArray, SamplingParams, TokenOutput

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LOCAL_ABILITIES = frozenset({Ability.STREAMING})
"""Abilities that are not offered across processes. A message per token costs too much: chunks are polled instead."""
CLOSE_TIMEOUT_S = 10.0


class RemoteServer(AsyncServerBase):
    """Client of a server in a Ray actor, which has other clients, too.

    Ray restarts the server's process if the process dies. Each request is one call of the actor.
    """

    restarts = True

    def __init__(
        self,
        actor: Any,
        *,
        client: str,
        info: ServerInfo,
        on_other_requests: Callable[[str, int], None] | None = None,
    ) -> None:
        """Create a client. Nothing is sent yet.

        Args:
            actor: The handle of a `ServerActor`.
            client: Unique name of this client. The server frees the client's sessions if the client dies.
            info: What the server offers.
            on_other_requests: Called after each response with the server's name and its number of in-flight requests
                of other clients.
        """
        self.name = info.name
        self._actor = actor
        self._client = client
        self._on_other_requests = on_other_requests
        self._call_ids = count()
        self._poller = PartialCompletionPoller(self._poll_partial_completions)
        self._background = BackgroundTasks()
        """Cancellations of requests, and ends of sessions."""
        self._cancelling: dict[str, asyncio.Task[None]] = {}
        """Cancellation of the last request of a session."""
        self._set_info(info)

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        call_id = f"{self._client}/{next(self._call_ids)}"
        request = (self._client, call_id, request_id, prompt_ids, sampling_params, tuple(attachments))
        if Ability.STREAMING not in self.info.abilities:
            return await self._generate(call_id, request_id, request)
        with self._poller.polling(call_id) as chunks:
            try:
                return await self._generate(call_id, request_id, request)
            except ServerDied as error:
                error.chunks = error.chunks or chunks  # a restarted server knows no chunks
                raise

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        call = self._actor.score.remote(token_ids, start, top_logprobs)
        try:
            return await self._await_call(call)
        except asyncio.CancelledError:
            load_ray().cancel(call)
            raise

    async def abort(self, request_id: str) -> None:
        await self._control("abort", request_id)

    def end_session(self, request_id: str) -> None:
        self._background.start(self._end_session(request_id, self._cancelling.pop(request_id, None)))

    async def flush(self, *, is_lost: bool) -> None:
        """Wait until the server has processed the cancellations and the ends of sessions so far.

        A lost server holds nothing that has to end, and Ray may keep calls of it until its actor has restarted.
        """
        await (self._background.close() if is_lost else self._background.wait())

    async def wake_up(self) -> None:
        await self._control("wake_up")

    async def sleep(self) -> None:
        await self._control("sleep")

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        raise ServerError("only the driver, which owns the server, publishes weights", server=self.name)

    async def health(self) -> ServerHealth:
        health, num_others = await self._control("health", self._client)
        self._report_others(num_others)
        return health

    async def close(self) -> None:
        """End the calls of this client in the background. The server continues to run."""
        await self._background.close()
        await self._poller.close()

    def _set_info(self, info: ServerInfo) -> None:
        self.info = info
        self.abilities = info.abilities - LOCAL_ABILITIES
        self.max_concurrent = info.max_concurrent

    async def _generate(self, call_id: str, session: str, request: tuple[Any, ...]) -> TokenOutput:
        """Call the actor. Cancelling this call cancels the completion at the server."""
        call = self._actor.generate.remote(*request)
        try:
            response, num_others = await self._await_call(call)
        except asyncio.CancelledError:
            self._cancelling[session] = self._background.start(self._quietly("cancel", call_id))
            raise
        self._report_others(num_others)
        if isinstance(response, PackedError):
            raise response.error
        return decode_completion(response)

    async def _end_session(self, session: str, cancelling: asyncio.Task[None] | None) -> None:
        if cancelling is not None:
            await asyncio.wait({cancelling})
        await self._quietly("end_session", self._client, session)

    async def _quietly(self, method: str, *args: Any) -> None:
        """Call the actor. A server that is gone holds nothing that has to end."""
        with suppress(ServerError):
            await self._control(method, *args)

    async def _poll_partial_completions(self, num_known: Mapping[str, int]) -> PartialCompletions:
        return await self._control("partial_completions", num_known)

    async def _control(self, method: str, *args: Any) -> Any:
        return await self._await_call(getattr(self._actor, method).remote(*args))

    async def _await_call(self, call: Any) -> Any:
        try:
            return await await_result(call)
        except ActorLost as error:
            raise ServerDied(str(error), server=self.name) from None

    def _report_others(self, num_requests: int) -> None:
        if self._on_other_requests is not None:
            self._on_other_requests(self.name, num_requests)


class OwnedServer(RemoteServer):
    """Client that owns its server's actor: creates the actor, publishes weights, and restores a restarted server."""

    def __init__(
        self, name: str, *, make_actor: Callable[[], Any], store: WeightStore, start_timeout_s: float
    ) -> None:
        """Create a client. The actor is created by `start`."""
        super().__init__(None, client="driver", info=ServerInfo(name, frozenset(), None))
        self._make_actor = make_actor
        self._store = store
        self._start_timeout_s = start_timeout_s
        self._published: PublishedWeights | None = None
        self._restoring: Future[Any] | None = None

    @property
    def actor(self) -> Any:
        """Handle of the actor; None before `start` and after `close`."""
        return self._actor

    async def start(self) -> None:
        self._actor = self._make_actor()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self._set_info(await self._await_call(self._actor.ensure_started.remote(None)))
        except TimeoutError:
            raise ServerTimeout(
                f"it did not start in {self._start_timeout_s:g} s; check with `ray status` whether the cluster has "
                "the resources that trainer.ray requests, or raise rollout.start_timeout_s",
                server=self.name,
            ) from None

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        self._published = await self._store.publish(weights, weight_version=weight_version)
        await self._control("update_weights", self._published)

    async def health(self) -> ServerHealth:
        """Return the server's health. A server that was restarted, or lacks weights, is restored in the background."""
        if self._actor is None:
            return ServerHealth(
                is_alive=False, num_running=0, num_waiting=0, weight_version=-1, detail="it was closed"
            )
        if (reason := await self._check_restoring()) is not None:
            logger.warning("server %s could not be restored after its restart: %s", self.name, reason)
        health = await super().health()
        is_behind = self._published is not None and health.weight_version != self._published.weight_version
        if (not health.is_alive or is_behind) and self._restoring is None:
            self._restoring = self._actor.ensure_started.remote(self._published).future()
        return health

    async def drop_client(self, client: str) -> None:
        """Free the sessions and requests of a client that died."""
        if self._actor is not None:
            await self._control("drop_client", client)

    async def close(self) -> None:
        await super().close()
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            await run_shielded(lambda: await_result(actor.close.remote()), timeout_s=CLOSE_TIMEOUT_S)
        except (ActorLost, AgentLoopError, TimeoutError) as error:
            logger.debug("server %s is killed, because it did not close: %s", self.name, error)
        finally:
            load_ray().kill(actor)

    async def _check_restoring(self) -> str | None:
        """Return why the last attempt to restore the server failed; None if it did not."""
        attempt = self._restoring
        if attempt is None or not attempt.done():
            return None
        self._restoring = None
        try:
            await self._await_call(asyncio.wrap_future(attempt))
        except AgentLoopError as error:
            return str(error)
        return None
