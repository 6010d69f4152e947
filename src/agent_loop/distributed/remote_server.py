"""Servers in other processes, as the worker and the driver see them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from agent_loop.distributed.contexts import SentContexts, token_bytes
from agent_loop.distributed.mailbox import Mailbox
from agent_loop.distributed.progress import Parts, Progress
from agent_loop.distributed.ray_module import ActorLost, answer_of, load_ray
from agent_loop.distributed.server_actor import CONTROL_GROUP
from agent_loop.distributed.weights import PublishedWeights, WeightStore
from agent_loop.distributed.wire import Ask, LineLost, PackedCompletion, Refusal, Resend, ServerFacts
from agent_loop.errors import AgentLoopError, ServerDied, ServerError, ServerTimeout
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenOutput

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

NOT_ACROSS_PROCESSES = frozenset({Ability.STREAMING})
"""A message per token costs too much: what running completions have is asked for now and then, all together."""
CLOSE_TIMEOUT_S = 10.0


class RemoteServer(AsyncServerBase):
    """A server in a Ray actor, as one client of several sees it.

    Ray starts its process again when it has died. A completion carries what the server has not seen of the session;
    those of one moment share a message.
    """

    restarts = True

    def __init__(
        self,
        actor: Any,
        *,
        client: str,
        facts: ServerFacts,
        on_other_requests: Callable[[str, int], None] | None = None,
    ) -> None:
        """Args:
        actor: The handle of a `ServerActor`.
        client: Names this client among all; what it holds at the server falls if it dies.
        on_other_requests: Told, with each answer, how many requests of other clients the server has.
        """
        self.name = facts.name
        self._actor = actor
        self._client = client
        self._on_other_requests = on_other_requests
        self._calls = count()
        self._contexts = SentContexts()
        self._progress = Progress(self._ask_for_parts)
        self._mailbox = Mailbox(
            open_line=self._open_line,
            exchange=self._exchange,
            on_reply=lambda r: self._note_others(r.num_others),
        )
        self._take(facts)

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        delta = self._contexts.delta(request_id, prompt_ids, attachments)
        response = await self._ask(Ask.pack(next(self._calls), request_id, delta, sampling_params))
        if isinstance(response, Resend):
            self._contexts.forget(request_id)
            delta = self._contexts.delta(request_id, prompt_ids, attachments)
            response = await self._ask(Ask.pack(next(self._calls), request_id, delta, sampling_params))
        if isinstance(response, Resend):
            raise ServerError("it does not keep the session", server=self.name, request_id=request_id)
        output = response.unpack()
        self._contexts.keep(
            request_id,
            delta=delta,
            prompt_ids=prompt_ids,
            attachments=attachments,
            completion=token_bytes(output.token_ids),
        )
        return output

    async def abort(self, request_id: str) -> None:
        await self._control("abort", request_id)

    def end_session(self, request_id: str) -> None:
        self._contexts.forget(request_id)
        self._mailbox.end(request_id)

    async def settled(self) -> None:
        """Waits until the server has done all that it was told so far, if it lives."""
        with suppress(LineLost):
            await self._mailbox.settled()

    async def wake_up(self) -> None:
        await self._control("wake_up")

    async def sleep(self) -> None:
        await self._control("sleep")

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        raise ServerError("weights are published by whoever owns the server", server=self.name)

    async def health(self) -> ServerHealth:
        health, num_others = await self._control("health", self._client)
        self._note_others(num_others)
        return health

    async def close(self) -> None:
        """The server is not this client's to end."""

    def _take(self, facts: ServerFacts) -> None:
        self.facts = facts
        self.abilities = facts.abilities - NOT_ACROSS_PROCESSES
        self.max_concurrent = facts.max_concurrent

    async def _ask(self, ask: Ask) -> PackedCompletion | Resend:
        """Raises: ServerDied: With what the server had sampled, as far as it is known."""
        if Ability.STREAMING not in self.facts.abilities:
            return await self._ask_once(ask)
        with self._progress.watching(ask.call) as chunks:
            try:
                return await self._ask_once(ask)
            except ServerDied as error:
                error.chunks = error.chunks or chunks  # one that was started anew knows of none
                raise

    async def _ask_once(self, ask: Ask) -> PackedCompletion | Resend:
        is_kept = False
        try:
            response = await self._mailbox.ask(ask)
            is_kept = not isinstance(response, Refusal)
        except LineLost as error:
            raise ServerDied(str(error), server=self.name, request_id=ask.session) from None
        finally:
            if not is_kept:
                self._contexts.forget(ask.session)
        if isinstance(response, Refusal):
            raise response.error
        return response

    async def _ask_for_parts(self, num_known: Mapping[int, int]) -> Parts:
        return await self._control("parts", self._client, num_known)

    async def _open_line(self) -> str:
        return await self._line_of(self._actor.open_line.remote(self._client))

    async def _exchange(self, packed: bytes) -> bytes:
        return await self._line_of(self._actor.exchange.remote(packed))

    async def _line_of(self, call: Any) -> Any:
        try:
            return await answer_of(call)
        except ActorLost as error:
            raise LineLost(str(error)) from None

    async def _control(self, method: str, *args: Any) -> Any:
        call = getattr(self._actor, method).options(concurrency_group=CONTROL_GROUP)
        return await self._answer_of(call.remote(*args))

    async def _answer_of(self, call: Any) -> Any:
        try:
            return await answer_of(call)
        except ActorLost as error:
            raise ServerDied(str(error), server=self.name) from None

    def _note_others(self, num_requests: int) -> None:
        if self._on_other_requests is not None:
            self._on_other_requests(self.name, num_requests)


class OwnedServer(RemoteServer):
    """The same for whoever made the actor: starts it, publishes weights, and brings it up again when it was started
    anew."""

    def __init__(
        self, name: str, *, make_actor: Callable[[], Any], store: WeightStore, start_timeout_s: float
    ) -> None:
        """Args:
        make_actor: Makes the actor; called by `start`.
        store: Shared by all servers of the run.
        start_timeout_s: How long it may take to find a place in the cluster and to come up.
        """
        super().__init__(None, client="driver", facts=ServerFacts(name, frozenset(), None))
        self._make_actor = make_actor
        self._store = store
        self._start_timeout_s = start_timeout_s
        self._published: PublishedWeights | None = None
        self._coming_up: Future[Any] | None = None

    @property
    def actor(self) -> Any:
        """The handle; None before `start` and after `close`."""
        return self._actor

    async def start(self) -> None:
        self._actor = self._make_actor()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self._take(await self._answer_of(self._actor.come_up.remote(None)))
        except TimeoutError:
            raise ServerTimeout(
                f"it did not come up in {self._start_timeout_s:g} s; see with `ray status` whether the cluster has "
                "what trainer.ray asks for, or raise rollout.start_timeout_s",
                server=self.name,
            ) from None

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        self._published = await self._store.publish(weights, weight_version=weight_version)
        await self._control("update_weights", self._published)

    async def health(self) -> ServerHealth:
        """As the server says; one that lacks the weights, or was started anew, is brought up meanwhile."""
        if self._actor is None:
            return ServerHealth(
                is_alive=False, num_running=0, num_waiting=0, weight_version=-1, detail="it was closed"
            )
        if (trouble := await self._look_at_coming_up()) is not None:
            logger.warning("server %s did not come up again: %s", self.name, trouble)
        health = await super().health()
        is_behind = self._published is not None and health.weight_version != self._published.weight_version
        if (not health.is_alive or is_behind) and self._coming_up is None:
            self._coming_up = self._actor.come_up.remote(self._published).future()
        return health

    async def drop_client(self, client: str) -> None:
        """Frees what a client that died had here."""
        if self._actor is not None:
            await self._control("drop_client", client)

    async def close(self) -> None:
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            call = actor.close.options(concurrency_group=CONTROL_GROUP).remote()
            await run_shielded(lambda: answer_of(call), timeout_s=CLOSE_TIMEOUT_S)
        except (ActorLost, AgentLoopError, TimeoutError) as error:
            logger.debug("server %s did not end by itself: %s", self.name, error)
        finally:
            load_ray().kill(actor)

    async def _look_at_coming_up(self) -> str | None:
        """Why the last attempt failed, if it did."""
        attempt = self._coming_up
        if attempt is None or not attempt.done():
            return None
        self._coming_up = None
        try:
            await self._answer_of(asyncio.wrap_future(attempt))
        except AgentLoopError as error:
            return str(error)
        return None
