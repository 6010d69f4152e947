"""Server with a simulated engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeAlias

from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenOutput
from simulation.engine import EngineModel, SimulatedEngine, SimulatedRequest

NextTokens: TypeAlias = Callable[[IntArray, str], Sequence[int]]
"""Function that returns the tokens that the model samples after a prompt of a session."""


class SimulatedServer(AsyncServerBase):
    """Server that takes the time of a real engine, on the clock of the event loop.

    No work is done per token: each server has one timer, for its next event.
    """

    abilities = frozenset({Ability.PREFIX_REUSE})

    def __init__(self, next_tokens: NextTokens, *, model: EngineModel, name: str = "simulated-0") -> None:
        self.name = name
        self.max_concurrent = model.max_concurrent
        self.engine = SimulatedEngine(model)
        self._next_tokens = next_tokens
        self._ids = count()
        self._running: dict[str, asyncio.Future[SimulatedRequest]] = {}
        """Future end of each request."""
        self._timer: asyncio.TimerHandle | None = None

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
        tokens = self._next_tokens(prompt_ids, request_id)
        running_id = f"{request_id}/{next(self._ids)}"
        self._running[running_id] = asyncio.get_running_loop().create_future()
        self._advance_engine()
        self.engine.submit(
            running_id, session=request_id, num_prompt_tokens=len(prompt_ids), num_tokens=len(tokens)
        )
        self._set_timer()
        try:
            ended = await self._running[running_id]
        except asyncio.CancelledError:
            self._advance_engine()
            self.engine.remove(running_id)
            self._running.pop(running_id, None)
            self._set_timer()
            raise
        return TokenOutput(
            token_ids=tokens[: ended.num_done],
            log_probs=None,
            stop_reason="stop",
            num_preempted=ended.num_preempted,
            num_cached_tokens=ended.num_cached,
            prefill_s=ended.first_token_after_s,
        )

    def end_session(self, request_id: str) -> None:
        """Do nothing. Cached tokens are evicted when room is needed, as in engines that cache by content."""

    async def health(self) -> ServerHealth:
        return ServerHealth(
            is_alive=True,
            num_running=self.engine.num_running,
            num_waiting=self.engine.num_waiting,
            weight_version=0,
            kv_cache_share=max(self.engine.kv_running, 0.0) / self.engine.model.kv_tokens,  # (rounding)
        )

    def _advance_engine(self) -> None:
        """Advance the engine to the current time."""
        for ended in self.engine.advance(asyncio.get_running_loop().time()):
            end = self._running.pop(ended.id)
            if not end.done():
                end.set_result(ended)

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
