"""Completions of an episode: begun, cut, and gone on with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from msgspec import Struct, structs

from agent_loop.runtime.concurrency import CallAborted, Signal, run_abortable
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput, as_token_ids

ABORT_GRACE_S = 5.0
"""How long a server may take to hand over the tokens of an aborted request."""


class Question(Struct, frozen=True):
    """What a turn asks of the servers."""

    context: IntArray
    """Shape [num_tokens]."""
    params: SamplingParams
    attachments: Sequence[Attachment]
    hear: Callable[[TokenChunk], bool] | None
    """Is given each token, and tells whether the model may go on."""

    def after(self, begun: TokenOutput) -> Question:
        """What is left to ask once so much was sampled."""
        context = as_token_ids([*self.context.tolist(), *begun.token_ids])
        return structs.replace(self, context=context, params=self.params.after(len(begun.token_ids)))


class TurnSampler:
    """Has the servers complete the turns of one episode, in a session of its own.

    Args:
        server_manager: The servers.
        request_id: The session.
        signal: Cuts a completion; its tokens so far are returned as `aborted`. None never comes.
    """

    def __init__(
        self, server_manager: AsyncLLMServerManager, *, request_id: str, signal: Signal | None
    ) -> None:
        self._server_manager = server_manager
        self._request_id = request_id
        self._signal = signal

    def sample(
        self,
        question: Question,
        begun: TokenOutput | None,
        *,
        keep_partial: Callable[[TokenOutput], object],
    ) -> Awaitable[TokenOutput]:
        """What the model says, behind what it has begun with.

        Args:
            begun: What was sampled of the completion before it was cut.
            keep_partial: Given all there is of the completion if the caller itself is cancelled.

        Raises, when it is awaited:
            CallAborted: The episode was cancelled, and nothing was sampled.
            ServerError: The server failed.
        """
        if begun is not None:
            return self._sample_rest(question, begun, keep_partial=keep_partial)
        if question.hear is None:
            generate = partial(
                self._server_manager.generate,
                self._request_id,
                prompt_ids=question.context,
                sampling_params=question.params,
                attachments=question.attachments,
            )
        else:
            generate = partial(self._generate_heard, question)
        abort = partial(self._server_manager.abort, self._request_id)
        return run_abortable(
            generate, abort=abort, keep_partial=keep_partial, grace_s=ABORT_GRACE_S, signal=self._signal
        )

    async def _sample_rest(
        self, question: Question, begun: TokenOutput, *, keep_partial: Callable[[TokenOutput], object]
    ) -> TokenOutput:
        if question.params.max_tokens is not None and len(begun.token_ids) >= question.params.max_tokens:
            return TokenOutput([], [], "length", weight_version=begun.weight_version)
        try:
            return await self.sample(
                question.after(begun), None, keep_partial=lambda rest: keep_partial(begun.then(rest))
            )
        except CallAborted:
            return TokenOutput([], [], "aborted", weight_version=begun.weight_version)

    async def _generate_heard(self, question: Question) -> TokenOutput:
        """Samples token by token, as long as it may go on."""
        chunks: list[TokenChunk] = []
        stream = self._server_manager.stream(
            self._request_id,
            prompt_ids=question.context,
            sampling_params=question.params,
            attachments=question.attachments,
        )
        async with aclosing(stream):
            async for chunk in stream:
                for piece in chunk.single_tokens():
                    if question.hear is None or question.hear(piece):
                        chunks.append(piece)
                    else:
                        return TokenOutput.from_chunks([*chunks, replace(piece, stop_reason="stop")])
        return TokenOutput.from_chunks(chunks)
