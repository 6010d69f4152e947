"""Weight updates under way for engines that cannot keep requests: they are aborted and go on from their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent_loop.errors import ServerError
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth
from agent_loop.servers.reply_check import bad_reply
from agent_loop.servers.work import Work
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput

if TYPE_CHECKING:
    import torch

ABORT_AGAIN_S = 0.5
"""An abort that came before the engine knew the request is sent again after so long."""


@dataclass(slots=True)
class _Request:
    is_set_aside: bool = False
    """By a weight update; it is to go on."""
    is_aborted: bool = False
    """By whoever asked for it."""


class SetsRequestsAside(AsyncServerBase):
    """A server in front of another one. Requests that run when new weights come are aborted there, and go on under the
    new weights from the tokens they have; those that come meanwhile wait."""

    def __init__(self, server: AsyncServerBase) -> None:
        self.name = server.name
        self.abilities = server.abilities | {Ability.UPDATE_IN_FLIGHT}
        self.max_concurrent = server.max_concurrent
        self._server = server
        self._requests: dict[str, _Request] = {}
        self._num_at_engine = 0
        self._is_idle = asyncio.Event()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._updating = asyncio.Lock()

    async def start(self) -> None:
        await self._server.start()
        self.abilities = self._server.abilities | {Ability.UPDATE_IN_FLIGHT}
        self.max_concurrent = self._server.max_concurrent

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        parts = self.stream(prompt_ids, sampling_params, request_id, attachments=attachments)
        async with aclosing(parts):
            return TokenOutput.from_chunks([chunk async for chunk in parts])

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
        work, request = Work(sampling_params, prompt_ids, request_id, attachments), _Request()
        self._requests[request_id] = request
        try:
            while not work.is_over:
                await self._is_open.wait()
                if request.is_aborted:
                    work.add(replace(_last(work), stop_reason="aborted"))
                    yield work.chunks[-1]
                    return
                request.is_set_aside = False
                async with self._at_engine(), aclosing(work.stream_on(self._server)) as chunks:
                    async for chunk in chunks:
                        if request.is_set_aside and chunk.stop_reason == "aborted":
                            chunk = replace(chunk, stop_reason=None)
                        work.add(chunk)
                        yield chunk
                if not work.is_over and not request.is_set_aside:
                    raise bad_reply(
                        "its stream ended without a stop reason", server=self.name, request_id=request_id
                    )
                if not work.is_over:
                    work.set_aside()
                    yield work.chunks[-1]
        finally:
            del self._requests[request_id]

    async def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.is_aborted, request.is_set_aside = True, False
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
                await self._set_all_aside()
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

    async def _set_all_aside(self) -> None:
        """Returns when the engine has no request any more."""
        while self._num_at_engine:
            self._is_idle.clear()
            for request in self._requests.values():
                request.is_set_aside = not request.is_aborted
            await run_together(self._server.abort(request_id) for request_id in list(self._requests))
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await self._is_idle.wait()


def _last(work: Work) -> TokenChunk:
    """Without its tokens."""
    version = work.chunks[-1].weight_version if work.chunks else 0
    return TokenChunk([], [], weight_version=version)
