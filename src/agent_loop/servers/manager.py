"""Client of all servers: balances requests, and keeps the sessions of each scope."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import structs

from agent_loop.chat.detokenizer import StopTextEnd
from agent_loop.errors import SamplingParamsError, ServerDied, ServerError
from agent_loop.runtime.concurrency import running_in_background
from agent_loop.seeds import CompletionSeeds
from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.servers.completion_memory import CompletionMemory
from agent_loop.servers.in_flight import InFlightRequest
from agent_loop.servers.pool import ServerPool
from agent_loop.servers.reply_check import ReplyCheck
from agent_loop.servers.scores import TokenScores, checked_scores, checked_text
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenIds, TokenOutput, as_token_ids

if TYPE_CHECKING:
    pass


class AsyncLLMServerManager:
    """Client of all servers. It balances load and keeps each session on one server.

    If a server dies, another server resumes its requests from the tokens sampled so far. Loops get a manager that is
    scoped to their trajectory: its sessions end with the trajectory.
    """

    def __init__(
        self,
        servers: Sequence[AsyncServerBase] | ServerPool,
        *,
        request_timeout_s: float | None = None,
        vocab_size: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """Create a client that does not start the servers.

        Args:
            servers: Servers, or a pool of servers.
            request_timeout_s: Time limit of a completion, time in the queue included. A completion that takes longer
                is aborted and fails. None sets no limit.
            vocab_size: Number of rows of the model's embedding. A completion with larger token ids fails. None allows
                any id.
            decode: Decoder of the tokenizer, which stop texts need.
        """
        self.pool = servers if isinstance(servers, ServerPool) else ServerPool(servers)
        """The servers. Also starts and closes them, publishes weights, and checks their health."""
        self._vocab_size = vocab_size
        self.decode = decode
        """Decoder of the tokenizer; None if requests cannot have stop texts."""
        self._check = ReplyCheck(vocab_size)
        self._request_timeout_s = request_timeout_s
        self._completions: CompletionMemory | None = None
        self._sessions: set[str] = set()
        self._is_over = False
        self._num_scoring: Counter[str] = Counter()
        """Number of texts that each server scores for this manager."""
        self._seeds: CompletionSeeds | None = None

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: TokenIds,
        sampling_params: Mapping[str, Any] | SamplingParams,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        """Sample one completion.

        Args:
            request_id: Id of the session. Later turns with the same id go to the same server, which has their prefix
                in its cache.
            prompt_ids: The whole context so far, shape [num_tokens].
            sampling_params: See `SamplingParams`.
            attachments: Everything attached to the context, counted from its first token, in order.

        Raises:
            SamplingParamsError: A parameter is unknown or out of range.
            ServerError: The server failed, or took longer than the time limit.
            ServerDied: The server died and no other is left.
            FatalRequest: Two servers died during the request.
            BadServerReply: The reply is not a completion of the prompt, or the server raised something other than
                `ServerError` or `SamplingParamsError`.
        """
        return await self._complete(self._new_request(request_id, prompt_ids, sampling_params, attachments))

    async def stream(
        self,
        request_id: str,
        *,
        prompt_ids: TokenIds,
        sampling_params: Mapping[str, Any] | SamplingParams,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        """Sample one completion and yield its chunks. The last chunk has a stop reason.

        Arguments and errors are those of `generate`. Leaving the iteration aborts the request.
        """
        chunks: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        request = self._new_request(
            request_id, prompt_ids, sampling_params, attachments, on_chunk=chunks.put_nowait
        )

        async def complete() -> None:
            try:
                await self._complete(request)
            finally:
                chunks.put_nowait(None)

        async with running_in_background(complete()):
            while (chunk := await chunks.get()) is not None:
                yield chunk

    async def score(self, token_ids: TokenIds, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        """Return the scores of a text, from the server with the fewest texts, or another one if that server dies.

        See `AsyncServerBase.score`.

        Raises:
            ServerError: No server can score, or the server failed.
            ServerDied: All servers that can score have died.
            BadServerReply: The reply of the server does not fit the text.
        """
        text = checked_text(
            token_ids, start=start, top_logprobs=top_logprobs, server="", vocab_size=self._vocab_size
        )
        left = [
            server
            for server in self.pool.servers
            if Ability.SCORE in server.abilities and server.name not in self.pool.lost
        ]
        if not left:
            raise ServerError(
                "no server can score the tokens of a text; use a server with the ability 'score', such as embedded, "
                "vllm or sglang"
            )
        while True:
            server = min(left, key=lambda server: self._num_scoring[server.name])
            self._num_scoring[server.name] += 1
            try:
                reply = await server.score(text, start=start, top_logprobs=top_logprobs)
            except ServerDied:
                left.remove(server)
                if not left:
                    raise
                continue
            finally:
                self._num_scoring[server.name] -= 1
            return checked_scores(
                reply,
                num_scores=len(text) - start,
                top_logprobs=top_logprobs,
                server=server.name,
                vocab_size=self._vocab_size,
            )

    async def abort(self, request_id: str) -> None:
        """Abort the running completion of a session. Its `generate` returns the tokens so far."""
        await self.pool.abort(request_id)

    def end_session(self, request_id: str) -> None:
        """End a session: no further turn will follow."""
        self._sessions.discard(request_id)
        self.pool.end_session(request_id)

    @contextmanager
    def scope(
        self,
        *,
        seed: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        completions: CompletionMemory | None = None,
    ) -> Generator[AsyncLLMServerManager]:
        """Yield a manager of the same servers whose sessions end with the body.

        Args:
            seed: Seed from which the seeds of completions without one are derived; None derives none.
            decode: Decoder of the tokenizer; None keeps this manager's.
            completions: Memory that gets each completion, so that a token-level loop need not return log-probs and
                weight versions.
        """
        scoped = AsyncLLMServerManager(
            self.pool,
            request_timeout_s=self._request_timeout_s,
            vocab_size=self._vocab_size,
            decode=decode or self.decode,
        )
        scoped._seeds = None if seed is None else CompletionSeeds(seed)
        scoped._completions = completions
        try:
            yield scoped
        finally:
            scoped._is_over = True
            for request_id in scoped._sessions:
                self.pool.end_session(request_id)

    def next_seed(self, context: IntArray) -> int | None:
        """Return the seed of this scope's next completion of a context.

        Returns None if the scope has no seed, or if a server lacks `Ability.FREE_SEEDS`.
        """
        if self._seeds is None or not self.pool.all_have(Ability.FREE_SEEDS):
            return None
        return self._seeds.next(context)

    def _new_request(
        self,
        request_id: str,
        prompt_ids: TokenIds,
        sampling_params: Mapping[str, Any] | SamplingParams,
        attachments: Sequence[Attachment],
        *,
        on_chunk: Callable[[TokenChunk], None] | None = None,
    ) -> InFlightRequest:
        """Begin the session and return its next request."""
        params, context = SamplingParams.parse(sampling_params), as_token_ids(prompt_ids)
        if params.seed is None and self._seeds is not None:
            params = structs.replace(params, seed=self.next_seed(context))
        stop_text_end = None
        if params.stop:
            if self.decode is None:
                raise SamplingParamsError(
                    f"stop is {params.stop!r:.80}, and this AsyncLLMServerManager has no tokenizer; create it with "
                    "decode=template.decode"
                )
            stop_text_end = StopTextEnd(
                params.stop, decode=self.decode, before=context.tolist(), num_sampled=params.num_sampled
            )
            params = structs.replace(params, stop=())
        if self._is_over:
            raise ServerError(
                "the trajectory is over; end the loop when CancelledError is raised", request_id=request_id
            )
        self._sessions.add(request_id)
        return InFlightRequest(
            params,
            context,
            request_id,
            attachments,
            check=self._check,
            on_chunk=on_chunk,
            stop_text_end=stop_text_end,
        )

    async def _complete(self, request: InFlightRequest) -> TokenOutput:
        try:
            return await self.pool.complete(request, timeout_s=self._request_timeout_s)
        finally:
            if self._completions is not None:
                self._completions.add(request.output, context=request.prompt_ids)
