"""Client of all servers: balances requests, and keeps the sessions of each scope."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

from msgspec import structs

from agent_loop.chat.detokenizer import StopTextEnd
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import SamplingParamsError, ServerDied, ServerError
from agent_loop.runtime.concurrency import running_in_background
from agent_loop.seeds import CompletionSeeds
from agent_loop.servers.balancer import LoadBalancer
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth
from agent_loop.servers.in_flight import InFlightRequest
from agent_loop.servers.pool import RequestAborted, ServerPool
from agent_loop.servers.reply_check import ReplyCheck
from agent_loop.servers.text_scorer import TextScorer
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenIds, TokenOutput, as_token_ids

if TYPE_CHECKING:
    import torch

    from agent_loop.serve.chat_replies import ChatCompletion, ChatCompletionChunk
    from agent_loop.serve.chat_requests import ChatCompletionRequest
    from agent_loop.serve.sampling import Sampler


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
        self._pool = servers if isinstance(servers, ServerPool) else ServerPool(servers)
        self._vocab_size = vocab_size
        self.decode = decode
        """Decoder of the tokenizer; None if requests cannot have stop texts."""
        self._check = ReplyCheck(vocab_size)
        self._request_timeout_s = request_timeout_s
        self._sessions = Sessions()
        self.scorer = TextScorer(self._available_servers, vocab_size=vocab_size)
        """Scores texts on the servers that are not lost."""
        self._seeds: CompletionSeeds | None = None

    @property
    def balancer(self) -> LoadBalancer:
        return self._pool.balancer

    @property
    def pool(self) -> ServerPool:
        """The servers."""
        return self._pool

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
        request = self._new_request(request_id, prompt_ids, sampling_params, attachments)
        return await self._complete(request)

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

    async def chat_completion(
        self, request: ChatCompletionRequest | Mapping[str, Any], *, template: ChatTemplate
    ) -> ChatCompletion:
        """Return the completion of an OpenAI chat request. The caller ends the session of a request with `session_id`.

        Raises:
            RequestError: The request has an unknown or unsupported field.
            ChatTemplateError: The template does not accept the messages.
            ServerError: See `generate`.
        """
        from agent_loop.serve.chat import chat_completion  # late: `serve` is above this layer

        return await chat_completion(request, template=template, sampler=self.sampler)

    async def stream_chat_completion(
        self, request: ChatCompletionRequest | Mapping[str, Any], *, template: ChatTemplate
    ) -> AsyncGenerator[ChatCompletionChunk]:
        """Yield the chunks of a chat completion as they are sampled. Leaving the iteration aborts the request."""
        from agent_loop.serve.chat import stream_chat_completion  # late: `serve` is above this layer

        chunks = stream_chat_completion(request, template=template, sampler=self.sampler)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    @property
    def sampler(self) -> Sampler:
        """The pool as a `Sampler`, for code that also works on one server."""
        return _ManagerSampler(self)

    @property
    def servers(self) -> Sequence[AsyncServerBase]:
        return self._pool.servers

    async def start(self) -> None:
        """Start all engines.

        Raises:
            ServerError: An engine did not start. All other engines were closed.
        """
        await self._pool.start()

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None]:
        """Check the servers' health while the body runs. See `ServerPool.watch`."""
        async with running_in_background(self._pool.watch()):
            yield

    async def abort(self, request_id: str) -> None:
        """Abort the running completion of a session. Its `generate` returns the tokens so far."""
        await self._pool.abort(request_id)

    def end_session(self, request_id: str) -> None:
        """End a session: no further turn will follow."""
        self._sessions.discard(request_id)
        self._pool.end_session(request_id)

    def scope(
        self, *, seed: int | None = None, decode: Callable[[Sequence[int]], str] | None = None
    ) -> ScopedServerManager:
        """Return a manager of the same servers for use in a `with` statement, at whose end its sessions end.

        Args:
            seed: Seed from which the seeds of completions without one are derived; None derives none.
            decode: Decoder of the tokenizer; None keeps this manager's.
        """
        scoped = ScopedServerManager(
            self._pool,
            request_timeout_s=self._request_timeout_s,
            vocab_size=self._vocab_size,
            decode=decode or self.decode,
        )
        scoped._seeds = None if seed is None else CompletionSeeds(seed)
        return scoped

    def next_seed(self, context: IntArray) -> int | None:
        """Return the seed of this scope's next completion of a context.

        Returns None if the scope has no seed, or if a server lacks `Ability.FREE_SEEDS`.
        """
        if self._seeds is None or not self._pool.all_have(Ability.FREE_SEEDS):
            return None
        return self._seeds.next(context)

    async def wake_up(self) -> None:
        """Make all servers ready to generate."""
        await self._pool.wake_up()

    async def sleep(self) -> None:
        """Free the KV caches of all servers and give their devices to the trainer."""
        await self._pool.sleep()

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        """Replace the weights of all servers. See `ServerPool.update_weights`."""
        await self._pool.update_weights(weights, weight_version=weight_version)

    async def health(self) -> list[ServerHealth]:
        """Return the health of each server."""
        return await self._pool.health()

    async def close(self) -> None:
        """Close all servers."""
        await self._pool.close()

    def _available_servers(self) -> list[AsyncServerBase]:
        return [server for server in self._pool.servers if server.name not in self._pool.lost]

    def _new_request(
        self,
        request_id: str,
        prompt_ids: TokenIds,
        sampling_params: Mapping[str, Any] | SamplingParams,
        attachments: Sequence[Attachment],
        *,
        on_chunk: Callable[[TokenChunk], None] | None = None,
    ) -> InFlightRequest:
        """Begin the session and return its next request. The request is streamed if `on_chunk` is given."""
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
        self._sessions.begin(request_id)
        return InFlightRequest(
            params,
            context,
            request_id,
            attachments,
            check=self._check,
            is_streamed=on_chunk is not None or stop_text_end is not None,
            on_chunk=on_chunk,
            stop_text_end=stop_text_end,
        )

    async def _complete(self, request: InFlightRequest) -> TokenOutput:
        """Lease a server and sample the request. Lease another server if that one dies.

        The pool queues the request, chooses the server by the balancer's policy, and applies the time limit. The lease
        is always released. Another server resumes the request from the tokens sampled so far.
        """
        while not request.is_finished:
            try:
                async with self._pool.lease(request, timeout_s=self._request_timeout_s) as lease:
                    await lease.sample()
            except RequestAborted:
                request.abort(weight_version=self._pool.weight_version)
            except ServerDied as error:
                if not request.is_finished and not self._pool.may_fail_over(error):
                    raise
        return request.output


class Sessions(set[str]):
    """Ids of the sessions that began in a scope."""

    is_closed = False
    """The scope has ended."""

    def begin(self, request_id: str) -> None:
        """Add a session.

        Raises:
            ServerError: The scope has ended, but its loop was abandoned and is still running.
        """
        if self.is_closed:
            raise ServerError(
                "the trajectory is over; end the loop when CancelledError is raised", request_id=request_id
            )
        self.add(request_id)


class ScopedServerManager(AsyncLLMServerManager):
    """Manager whose sessions end with a `with` block. See `AsyncLLMServerManager.scope`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sessions.is_closed = True
        for request_id in self._sessions:
            self._pool.end_session(request_id)


class _ManagerSampler:
    """Implementation of `Sampler` over all servers of a manager."""

    def __init__(self, manager: AsyncLLMServerManager) -> None:
        self._manager = manager

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        return await self._manager.generate(
            request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, attachments=attachments
        )

    def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        return self._manager.stream(
            request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, attachments=attachments
        )

    def end_session(self, request_id: str) -> None:
        self._manager.end_session(request_id)
