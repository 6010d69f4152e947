"""A simulated engine behind the seam of all servers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from agent_loop.errors import BadPrompt, ServerDied, ServerError
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth
from agent_loop.simulation.engine import Engine, EngineModel, Running
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, ServerStopReason, TokenChunk, TokenOutput

if TYPE_CHECKING:
    import torch

Sayings: TypeAlias = Callable[[IntArray, str], Sequence[int]]
"""What the model says after a prompt in a session."""


@dataclass(frozen=True, slots=True)
class _End:
    running: Running
    reason: ServerStopReason | None
    """None: the server died."""


class SimulatedServer(AsyncServerBase):
    """Takes the time that an engine would take, on the clock of the event loop.

    Nothing happens per token: there is one timer per server, for its next event.
    """

    abilities = frozenset({Ability.STREAMING, Ability.PREFIX_REUSE, Ability.UPDATE_IN_FLIGHT, Ability.SLEEP})

    def __init__(self, says: Sayings, *, model: EngineModel, name: str = "simulated-0") -> None:
        self.name = name
        self.max_concurrent = model.max_concurrent
        self.engine = Engine(model)
        self._says = says
        self._ids = count()
        self._running: dict[str, tuple[str, asyncio.Future[_End]]] = {}
        """By session: the request's id and its end."""
        self._sessions: dict[str, str] = {}
        """By the request's id."""
        self._timer: asyncio.TimerHandle | None = None
        self._weight_version = 0
        self._end_reason: str | None = None
        self._hangs = asyncio.Event()
        self.is_asleep = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        tokens, end = await self._complete(prompt_ids, sampling_params, request_id)
        if end.reason is None:
            raise self._death(request_id)
        return TokenOutput(
            token_ids=tokens,
            log_probs=None,
            stop_reason=end.reason,
            weight_version=self._weight_version,
            num_preempted=end.running.num_preempted,
            num_cached_tokens=end.running.num_cached,
            prefill_s=end.running.first_token_after_s,
        )

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        """Hands out what there is when the completion ends, or the server dies."""
        tokens, end = await self._complete(prompt_ids, sampling_params, request_id)
        yield TokenChunk(
            tokens,
            None,
            weight_version=self._weight_version,
            stop_reason=end.reason,
            num_preempted=end.running.num_preempted,
            num_cached_tokens=end.running.num_cached,
            prefill_s=end.running.first_token_after_s,
        )
        if end.reason is None:
            raise self._death(request_id)

    async def abort(self, request_id: str) -> None:
        self._withdraw(request_id)

    def end_session(self, request_id: str) -> None:
        """Changes nothing: what was cached goes when its room is needed, as in engines that cache by content."""

    def die(self, reason: str = "the engine was killed") -> None:
        """Has everything fail from here on, as after a `kill -9` of an engine."""
        self._end_reason = reason
        self._settle()
        for lost in self.engine.empty():
            self._end(lost, None)
        self._arm()

    def revive(self) -> None:
        """Comes back as a new process does: with an empty cache and the first weights."""
        self._end_reason = None
        self._weight_version = 0
        self._hangs.clear()

    def hang(self) -> None:
        """Answers nothing from here on, not even how it is."""
        self._settle()
        self._hangs.set()
        self.engine.empty()
        self._arm()

    async def wake_up(self) -> None:
        self._fail_if_dead("")
        self.is_asleep = False

    async def sleep(self) -> None:
        if self._running:
            raise ServerError(f"{len(self._running)} requests are still running", server=self.name)
        self.is_asleep = True

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        self._fail_if_dead("")
        self._weight_version = weight_version

    async def health(self) -> ServerHealth:
        if self._hangs.is_set():
            await asyncio.Event().wait()
        return ServerHealth(
            is_alive=self._end_reason is None,
            num_running=self.engine.num_running,
            num_waiting=self.engine.num_waiting,
            weight_version=self._weight_version,
            detail=self._end_reason or "",
            kv_cache_share=max(self.engine.kv_running, 0.0) / self.engine.model.kv_tokens,  # (rounding)
        )

    async def close(self) -> None:
        self.die("the server was closed")

    async def _complete(
        self, prompt_ids: IntArray, params: SamplingParams, session: str
    ) -> tuple[list[int], _End]:
        self._refuse_if_unable(prompt_ids, session)
        says = self._says(prompt_ids, session)
        request_id = f"{session}/{next(self._ids)}"
        end: asyncio.Future[_End] = asyncio.get_running_loop().create_future()
        self._running[session], self._sessions[request_id] = (request_id, end), session
        self._settle()
        if not self._hangs.is_set():
            limit = params.max_tokens or len(says)
            self.engine.submit(
                request_id,
                session=session,
                num_prompt_tokens=len(prompt_ids),
                num_tokens=min(len(says), limit),
            )
        self._arm()
        try:
            ended = await end
        except asyncio.CancelledError:
            self._withdraw(session)
            raise
        return list(says[: ended.running.num_done]), ended

    def _refuse_if_unable(self, prompt_ids: IntArray, session: str) -> None:
        self._fail_if_dead(session)
        if self.is_asleep:
            raise ServerError(
                "the server is asleep; call wake_up first", server=self.name, request_id=session
            )
        if session in self._running:
            raise ServerError(
                "a request of this session is already running", server=self.name, request_id=session
            )
        if not 0 < len(prompt_ids) < self.engine.model.kv_tokens:
            raise BadPrompt(
                f"the prompt has {len(prompt_ids)} tokens; give at least 1, and fewer than the KV cache holds "
                f"({self.engine.model.kv_tokens})",
                server=self.name,
                request_id=session,
            )

    def _withdraw(self, session: str) -> None:
        """Ends a session's request, if one runs."""
        known = self._running.get(session)
        if known is None:
            return
        self._settle()  # it may just have ended
        running = self.engine.withdraw(known[0])
        if running is not None:
            self._end(running, "aborted")
        elif self._running.pop(session, None) is not None:  # the server hangs
            del self._sessions[known[0]]
            known[1].cancel()
        self._arm()

    def _settle(self) -> None:
        """Brings the engine to the present."""
        for running in self.engine.advance(asyncio.get_running_loop().time()):
            self._end(running, "stop")

    def _end(self, running: Running, reason: ServerStopReason | None) -> None:
        session = self._sessions.pop(running.id)
        _, end = self._running.pop(session)
        if not end.done():
            end.set_result(_End(running, reason))

    def _arm(self) -> None:
        """Sets the timer to the next event. One that is due earlier than that sets it anew when it comes."""
        due = self.engine.next_event()
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
            self._timer = None
        if due < math.inf:
            self._timer = asyncio.get_running_loop().call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._settle()
        self._arm()

    def _fail_if_dead(self, session: str) -> None:
        if self._end_reason is not None:
            raise self._death(session)

    def _death(self, session: str) -> ServerDied:
        return ServerDied(self._end_reason or "it died", server=self.name, request_id=session)
