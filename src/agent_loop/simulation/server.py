"""Server with a simulated engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from agent_loop.errors import BadPrompt, ServerDied, ServerError
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth
from agent_loop.simulation.engine import EngineModel, SimulatedEngine, SimulatedRequest
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, ServerStopReason, TokenChunk, TokenOutput

if TYPE_CHECKING:
    import torch

NextTokens: TypeAlias = Callable[[IntArray, str], Sequence[int]]
"""Function that returns the tokens that the model samples after a prompt of a session."""


@dataclass(frozen=True, slots=True)
class _RequestEnd:
    running: SimulatedRequest
    reason: ServerStopReason | None
    """None if the server died."""


class SimulatedServer(AsyncServerBase):
    """Server that takes the time of a real engine, on the clock of the event loop.

    No work is done per token: each server has one timer, for its next event.
    """

    abilities = frozenset({Ability.STREAMING, Ability.PREFIX_REUSE, Ability.UPDATE_IN_FLIGHT, Ability.SLEEP})

    def __init__(self, next_tokens: NextTokens, *, model: EngineModel, name: str = "simulated-0") -> None:
        self.name = name
        self.max_concurrent = model.max_concurrent
        self.engine = SimulatedEngine(model)
        self._next_tokens = next_tokens
        self._ids = count()
        self._running: dict[str, tuple[str, asyncio.Future[_RequestEnd]]] = {}
        """Request id and future end, by session."""
        self._sessions: dict[str, str] = {}
        """Session, by request id."""
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
            raise self._death_error(request_id)
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
        """Yield the sampled tokens in one chunk when the completion ends or the server dies."""
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
            raise self._death_error(request_id)

    async def abort(self, request_id: str) -> None:
        self._abort(request_id)

    def end_session(self, request_id: str) -> None:
        """Do nothing. Cached tokens are evicted when room is needed, as in engines that cache by content."""

    def die(self, reason: str = "the engine was killed") -> None:
        """Fail all requests from now on, as after a `kill -9` of the engine."""
        self._end_reason = reason
        self._advance_engine()
        for lost in self.engine.clear():
            self._end(lost, None)
        self._set_timer()

    def revive(self) -> None:
        """Restart like a new process, with an empty cache and the initial weights."""
        self._end_reason = None
        self._weight_version = 0
        self._hangs.clear()

    def hang(self) -> None:
        """Stop responding from now on, to health checks too."""
        self._advance_engine()
        self._hangs.set()
        self.engine.clear()
        self._set_timer()

    async def wake_up(self) -> None:
        self._raise_if_dead("")
        self.is_asleep = False

    async def sleep(self) -> None:
        if self._running:
            raise ServerError(f"{len(self._running)} requests are still running", server=self.name)
        self.is_asleep = True

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        self._raise_if_dead("")
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
    ) -> tuple[list[int], _RequestEnd]:
        self._raise_if_unable(prompt_ids, session)
        next_tokens = self._next_tokens(prompt_ids, session)
        request_id = f"{session}/{next(self._ids)}"
        end: asyncio.Future[_RequestEnd] = asyncio.get_running_loop().create_future()
        self._running[session], self._sessions[request_id] = (request_id, end), session
        self._advance_engine()
        if not self._hangs.is_set():
            limit = params.max_tokens or len(next_tokens)
            self.engine.submit(
                request_id,
                session=session,
                num_prompt_tokens=len(prompt_ids),
                num_tokens=min(len(next_tokens), limit),
            )
        self._set_timer()
        try:
            ended = await end
        except asyncio.CancelledError:
            self._abort(session)
            raise
        return list(next_tokens[: ended.running.num_done]), ended

    def _raise_if_unable(self, prompt_ids: IntArray, session: str) -> None:
        self._raise_if_dead(session)
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

    def _abort(self, session: str) -> None:
        """Abort the running request of a session, if any."""
        known = self._running.get(session)
        if known is None:
            return
        self._advance_engine()  # the request may have just ended
        running = self.engine.remove(known[0])
        if running is not None:
            self._end(running, "aborted")
        elif self._running.pop(session, None) is not None:  # the server hangs
            del self._sessions[known[0]]
            known[1].cancel()
        self._set_timer()

    def _advance_engine(self) -> None:
        """Advance the engine to the current time."""
        for running in self.engine.advance(asyncio.get_running_loop().time()):
            self._end(running, "stop")

    def _end(self, running: SimulatedRequest, reason: ServerStopReason | None) -> None:
        session = self._sessions.pop(running.id)
        _, end = self._running.pop(session)
        if not end.done():
            end.set_result(_RequestEnd(running, reason))

    def _set_timer(self) -> None:
        """Set the timer to the next event. A timer that is due earlier stays and sets the next one."""
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
        self._advance_engine()
        self._set_timer()

    def _raise_if_dead(self, session: str) -> None:
        if self._end_reason is not None:
            raise self._death_error(session)

    def _death_error(self, session: str) -> ServerDied:
        return ServerDied(self._end_reason or "it died", server=self.name, request_id=session)
