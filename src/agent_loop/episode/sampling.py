"""Sampling of an episode's turns: abort, early stop, and resumption."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from msgspec import Struct, structs

from agent_loop.runtime.concurrency import CallAborted, run_abortable
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput, as_token_ids

ABORT_GRACE_S = 5.0
"""Seconds that a server has to return the tokens of an aborted request."""


class TurnRequest(Struct, frozen=True):
    """Request for one assistant turn."""

    context: IntArray
    """Shape [num_tokens]."""
    params: SamplingParams
    attachments: Sequence[Attachment]
    on_token: Callable[[TokenChunk], bool] | None
    """Callback for each token, which returns whether to continue sampling."""

    def after(self, begun: TokenOutput) -> TurnRequest:
        """Return the request for the rest of a turn whose first tokens were sampled before."""
        context = as_token_ids([*self.context.tolist(), *begun.token_ids])
        return structs.replace(self, context=context, params=self.params.after(len(begun.token_ids)))


class TurnSampler:
    """Samples the turns of one episode in one session."""

    def __init__(
        self, server_manager: AsyncLLMServerManager, *, request_id: str, event: asyncio.Event | None
    ) -> None:
        self._server_manager = server_manager
        self._request_id = request_id
        self._event = event

    def sample(
        self,
        turn: TurnRequest,
        begun: TokenOutput | None,
        *,
        keep_partial: Callable[[TokenOutput], object],
    ) -> Awaitable[TokenOutput]:
        """Sample a turn, or the rest of an aborted turn."""
        if begun is not None:
            return self._sample_rest(turn, begun, keep_partial=keep_partial)
        if turn.on_token is None:
            generate = partial(
                self._server_manager.generate,
                self._request_id,
                prompt_ids=turn.context,
                sampling_params=turn.params,
                attachments=turn.attachments,
            )
        else:
            generate = partial(self._generate_until_stopped, turn)
        abort = partial(self._server_manager.abort, self._request_id)
        return run_abortable(
            generate, abort=abort, keep_partial=keep_partial, grace_s=ABORT_GRACE_S, event=self._event
        )

    async def _sample_rest(
        self, turn: TurnRequest, begun: TokenOutput, *, keep_partial: Callable[[TokenOutput], object]
    ) -> TokenOutput:
        if turn.params.max_tokens is not None and len(begun.token_ids) >= turn.params.max_tokens:
            return TokenOutput([], [], "length", weight_version=begun.weight_version)
        try:
            return await self.sample(
                turn.after(begun), None, keep_partial=lambda rest: keep_partial(begun.then(rest))
            )
        except CallAborted:
            return TokenOutput([], [], "aborted", weight_version=begun.weight_version)

    async def _generate_until_stopped(self, turn: TurnRequest) -> TokenOutput:
        """Sample token by token until the callback returns False."""
        chunks: list[TokenChunk] = []
        stream = self._server_manager.stream(
            self._request_id,
            prompt_ids=turn.context,
            sampling_params=turn.params,
            attachments=turn.attachments,
        )
        async with aclosing(stream):
            async for chunk in stream:
                for piece in chunk.single_tokens():
                    if turn.on_token is None or turn.on_token(piece):
                        chunks.append(piece)
                    else:
                        return TokenOutput.from_chunks([*chunks, replace(piece, stop_reason="stop")])
        return TokenOutput.from_chunks(chunks)
