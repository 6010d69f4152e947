"""Weight updates for engines that cannot keep requests: abort the requests and resume them from their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent_loop.errors import ServerError
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth
from agent_loop.servers.in_flight import InFlightRequest
from agent_loop.servers.reply_check import bad_reply
from agent_loop.servers.scores import TokenScores
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk

if TYPE_CHECKING:
    import torch

ABORT_AGAIN_S = 0.5
"""Interval at which aborts are repeated, in case the engine had not yet received the request."""


@dataclass(slots=True)
class _RequestState:
    is_interrupted: bool = False
    """Whether a weight update aborted the request. Such a request is resumed."""
    is_aborted: bool = False
    """Whether the client aborted the request."""


class AbortAndResumeServer(AsyncServerBase):
    """Wrapper around a server that aborts running requests for a weight update and resumes them under the new weights.

    Requests are resumed from their tokens. Requests that arrive during the update wait for its end.
    """

    def __init__(self, server: AsyncServerBase) -> None:
        self.name = server.name
        self.abilities = server.abilities | {Ability.UPDATE_IN_FLIGHT}
        self.max_concurrent = server.max_concurrent
        self._server = server
        self._requests: dict[str, _RequestState] = {}
        self._num_at_engine = 0
        self._is_idle = asyncio.Event()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._updating = asyncio.Lock()

    async def start(self) -> None:
        await self._server.start()
        self.abilities = self._server.abilities | {Ability.UPDATE_IN_FLIGHT}
        self.max_concurrent = self._server.max_concurrent

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        if request_id in self._requests:
            raise ServerError(
                "a request of this session is already running", server=self.name, request_id=request_id
            )
        request = InFlightRequest(sampling_params, prompt_ids, request_id, attachments)
        state = self._requests[request_id] = _RequestState()
        try:
            while not request.is_finished:
                await self._is_open.wait()
                if state.is_aborted:
                    request.abort()
                    yield request.chunks[-1]
                    return
                state.is_interrupted = False
                async with self._at_engine(), aclosing(request.stream_rest(self._server)) as chunks:
                    async for chunk in chunks:
                        if state.is_interrupted and chunk.stop_reason == "aborted":
                            chunk = replace(chunk, stop_reason=None)
                        request.add(chunk)
                        yield chunk
                if not request.is_finished and not state.is_interrupted:
                    raise bad_reply(
                        "the stream ended without a stop reason", server=self.name, request_id=request_id
                    )
                if not request.is_finished:
                    request.note_interruption()
                    yield request.chunks[-1]
        finally:
            del self._requests[request_id]

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        await self._is_open.wait()
        async with self._at_engine():  # a weight update waits for the end of the score
            return await self._server.score(token_ids, start=start, top_logprobs=top_logprobs)

    async def abort(self, request_id: str) -> None:
        state = self._requests.get(request_id)
        if state is not None:
            state.is_aborted, state.is_interrupted = True, False
            await self._server.abort(request_id)

    def end_session(self, request_id: str) -> None:
        self._server.end_session(request_id)

    async def wake_up(self) -> None:
        await self._server.wake_up()

    async def sleep(self) -> None:
        await self._server.sleep()

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        async with self._updating:
            self._is_open.clear()
            try:
                await self._abort_all()
                await self._server.update_weights(weights, weight_version=weight_version)
            finally:
                self._is_open.set()

    async def health(self) -> ServerHealth:
        return await self._server.health()

    async def close(self) -> None:
        await self._server.close()

    @asynccontextmanager
    async def _at_engine(self) -> AsyncGenerator[None]:
        self._num_at_engine += 1
        try:
            yield
        finally:
            self._num_at_engine -= 1
            if not self._num_at_engine:
                self._is_idle.set()

    async def _abort_all(self) -> None:
        """Abort all requests. Return when the engine has none left."""
        while self._num_at_engine:
            self._is_idle.clear()
            for state in self._requests.values():
                state.is_interrupted = not state.is_aborted
            await run_together(self._server.abort(request_id) for request_id in list(self._requests))
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await self._is_idle.wait()
