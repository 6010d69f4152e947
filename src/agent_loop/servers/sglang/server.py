"""Base class of the SGLang server and client."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from agent_loop.errors import BadServerReply, ServerError
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth, ServerSpec
from agent_loop.servers.prompt_limits import PromptLimits
from agent_loop.servers.publishing import WeightPublisher
from agent_loop.servers.scores import TokenScores, checked_scores, checked_text, scores_of_no_token
from agent_loop.servers.sglang.in_flight import SGLangRequest, SGLangRequests
from agent_loop.servers.sglang.requests import (
    CONSTRAINT_ABILITIES,
    SAMPLING_ABILITIES,
    GenerateReply,
    check_params,
    generate_body,
    needs_own_stop,
    read_reply,
    schema_errors,
    stamp,
)
from agent_loop.servers.sglang.scores import read_scores, score_body
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput

if TYPE_CHECKING:
    import torch

    from agent_loop.weights import WeightHandle

NOT_STARTED = "the server was not started; await start() first"
CLOSED = "the server was closed; start another server"
HEALTH_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 600.0
ABORT_INTERVAL_S = 0.2
SLEEP_TAGS = ("kv_cache", "weights")


class HeldTokens:
    """Tokens of one completion that wait for their weight versions."""

    def __init__(self, *, stop_token_ids: frozenset[int]) -> None:
        """Create an empty buffer.

        Args:
            stop_token_ids: Stop tokens that the engine ignores. The completion is cut after the first of them.
        """
        self.num_read = 0
        """Tokens that were read, including those after the cut."""
        self.is_cut = False
        """Whether a stop token was read."""
        self._stops = stop_token_ids
        self._num_released = 0
        self._chunks: list[TokenChunk] = []

    def add(self, reply: GenerateReply) -> bool:
        """Add the tokens of a reply; return whether one of them is a stop token that cuts the completion."""
        token_ids = reply.chunk.token_ids
        self.num_read += len(token_ids)
        if self.is_cut:
            return False
        ends = [place for place, token in enumerate(token_ids, 1) if token in self._stops]
        self.is_cut = bool(ends)
        self._chunks.append(reply.chunk.part(0, ends[0]) if ends else reply.chunk)
        return self.is_cut

    def release(self, reply: GenerateReply) -> list[TokenChunk]:
        """Return all held tokens with the weight versions of the last reply."""
        whole = replace(
            TokenChunk.joined(self._chunks or [TokenChunk([], [])]),
            stop_reason="stop" if self.is_cut else reply.chunk.stop_reason,
            num_preempted=reply.chunk.num_preempted,
            num_cached_tokens=reply.chunk.num_cached_tokens,
        )
        chunks = stamp(whole, first=self._num_released, weight_versions=reply.weight_versions)
        self._num_released += len(whole.token_ids)
        self._chunks = []
        return chunks


class SGLangConnection(Protocol):
    """Connection to an engine that takes the paths and JSON bodies of SGLang's HTTP server."""

    async def call(
        self, path: str, body: Mapping[str, Any], *, request_id: str = "", timeout_s: float | None = None
    ) -> Any:
        """Send a request and return its reply. Cancelling a call of `/generate` aborts the request.

        Raises:
            ServerError: The request failed.
        """
        ...

    def stream(self, path: str, body: Mapping[str, Any], *, request_id: str = "") -> AsyncGenerator[Any]:
        """Send a request and yield its replies. Closing the generator early aborts the request.

        Raises:
            ServerError: The request failed.
        """
        ...

    async def close(self) -> None: ...


class SGLangBase(AsyncServerBase):
    """Completions, aborts, sleep and weight updates of SGLang, over any connection.

    An update takes running requests out of the batch, empties the prefix cache, loads the weights, and resumes the
    requests. Their context is prefilled again under the new weights, which counts as a preemption. SGLang could also
    keep the old cache and resume faster. The tokens of the current step would then have the wrong weight version, and
    the cache could not be emptied.
    """

    def __init__(self, spec: ServerSpec, *, publisher: WeightPublisher, takes_seeds: bool) -> None:
        self.name = spec.name
        self.abilities = frozenset(
            {
                *SAMPLING_ABILITIES,
                *CONSTRAINT_ABILITIES,
                Ability.STREAMING,
                Ability.PREFIX_REUSE,
                Ability.WEIGHT_UPDATE,
                Ability.UPDATE_IN_FLIGHT,
                Ability.SCORE,
            }
        ) | ({Ability.SEED} if takes_seeds else frozenset[Ability]())
        self._spec = spec
        self._publisher = publisher
        self._running = SGLangRequests(spec.name)
        self._score_numbers = count()
        self._control = asyncio.Lock()
        self._weight_version = 0
        self._is_asleep = False
        self._released: set[str] = set()
        self._trouble = NOT_STARTED
        self._connection: SGLangConnection | None = None
        self._limits: PromptLimits | None = None

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        room = self._check(prompt_ids, sampling_params, request_id, attachments)
        with self._running.enter(request_id) as running, schema_errors(sampling_params):
            if needs_own_stop(sampling_params):
                async with aclosing(self._parts(prompt_ids, sampling_params, running, room=room)) as chunks:
                    return TokenOutput.from_chunks([chunk async for chunk in chunks])
            if not await self._running.send(running):
                return TokenOutput([], [], "aborted", weight_version=self._weight_version)
            body = generate_body(
                prompt_ids, sampling_params, rid=running.rid, max_new_tokens=room, stream=False
            )
            event = await self._connected.call("/generate", body, request_id=request_id)
            reply = self._read(event, num_seen=0, request_id=request_id)
            if reply.chunk.stop_reason is None:
                raise BadServerReply(
                    "SGLang's reply is not finished", server=self.name, request_id=request_id
                )
            return TokenOutput.from_chunks(
                [self._without_inexact_logprobs(chunk) for chunk in reply.chunks()]
            )

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        """Yield the completion in chunks. See `AsyncServerBase.stream`.

        Tokens after a weight update come in one chunk at the end, when SGLang reports the weight version of each token.
        """
        room = self._check(prompt_ids, sampling_params, request_id, attachments)
        with self._running.enter(request_id) as running, schema_errors(sampling_params):
            async with aclosing(self._parts(prompt_ids, sampling_params, running, room=room)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        limits = self._usable_limits("")
        text = checked_text(
            token_ids,
            start=start,
            top_logprobs=top_logprobs,
            server=self.name,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
        )
        num_top = min(top_logprobs, limits.vocab_size)
        if start == len(text):
            return scores_of_no_token(num_top)
        request_id = f"score-{next(self._score_numbers)}"
        with self._running.enter(request_id) as running:
            if not await self._running.send(running):
                raise ServerError("the request was aborted", server=self.name)
            body = score_body(text, start=start, num_top=num_top, rid=running.rid)
            reply = await self._connected.call("/generate", body)
        scores = read_scores(reply, token_ids=text, start=start, num_top=num_top, server=self.name)
        return checked_scores(
            scores,
            num_scores=len(text) - start,
            top_logprobs=num_top,
            server=self.name,
            vocab_size=limits.vocab_size,
        )

    async def abort(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is None:
            return
        running.is_aborted = True
        while running.is_sent and not running.is_over.is_set():
            # Repeated, because the engine ignores an abort that arrives before its request.
            with suppress(ServerError):  # the request itself fails with the same error
                await self._connected.call("/abort_request", {"rid": running.rid})
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_INTERVAL_S):
                    await running.is_over.wait()

    def end_session(self, request_id: str) -> None:
        """Do nothing. SGLang evicts the oldest prefixes when it needs their memory."""

    async def wake_up(self) -> None:
        async with self._control:
            await self._resume(self._released)
            self._is_asleep = False

    async def sleep(self) -> None:
        async with self._control:
            if self._running:
                raise ServerError(
                    f"{len(self._running)} requests are still running; await or abort them before sleep()",
                    server=self.name,
                )
            if Ability.SLEEP in self.abilities and not self._is_asleep:
                tags = [tag for tag in SLEEP_TAGS if tag not in self._released]
                await self._connected.call(
                    "/release_memory_occupation", {"tags": tags}, timeout_s=CONTROL_TIMEOUT_S
                )
                self._released.update(tags)
            self._is_asleep = True

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        async with self._control:
            connection = self._connected
            async with self._publisher.offer(weights, weight_version=weight_version) as handle:
                await self._resume(self._released & {"weights"})
                async with self._paused(connection):
                    await self._load(connection, handle)
                    self._weight_version = weight_version

    async def health(self) -> ServerHealth:
        detail = self._trouble
        shares: list[float] = []
        if not detail:
            try:
                await self._connected.call("/server_info", {}, timeout_s=HEALTH_TIMEOUT_S)
                reply = await self._connected.call("/v1/loads", {}, timeout_s=HEALTH_TIMEOUT_S)
                shares = [float(load["token_usage"]) for load in reply["loads"]]
            except ServerError as error:
                detail = str(error)
        return ServerHealth(
            is_alive=not detail,
            num_running=self._running.num_sent,
            num_waiting=len(self._running) - self._running.num_sent,
            weight_version=self._weight_version,
            detail=detail,
            kv_cache_share=max(shares, default=None),
        )

    async def close(self) -> None:
        self._trouble = CLOSED
        self._publisher.close()
        if self._connection is not None:
            await self._connection.close()

    @abstractmethod
    async def _load(self, connection: SGLangConnection, handle: WeightHandle) -> None:
        """Load the weights into the paused engine, empty its cache, and set its weight version.

        Raises:
            WeightsError: The engine refused the weights.
        """

    @property
    def _has_cache(self) -> bool:
        """Whether there is a prefix cache to empty. `sleep` on a GPU frees the cache."""
        return "kv_cache" not in self._released

    def _mixed(self, why: str) -> ServerError:
        """Stop using an engine that has a part of the new weights. Return the error to raise."""
        self._trouble = f"its weights are partly old and partly new ({why}); start the server again"
        return ServerError(self._trouble, server=self.name)

    @property
    def _connected(self) -> SGLangConnection:
        if self._connection is None or self._trouble:
            raise ServerError(self._trouble or NOT_STARTED, server=self.name)
        return self._connection

    def _check(
        self,
        prompt_ids: IntArray,
        params: SamplingParams,
        request_id: str,
        attachments: Sequence[Attachment],
    ) -> int:
        """Check a request, and return the maximum number of tokens to sample."""
        limits = self._usable_limits(request_id)
        check_params(params, abilities=self.abilities, server=self.name)
        room = limits.check(request_id, prompt_ids=prompt_ids, attachments=attachments)
        return room if params.max_tokens is None else min(room, params.max_tokens)

    def _usable_limits(self, request_id: str) -> PromptLimits:
        """Return the limits of requests, if the server can take one."""
        trouble = self._trouble or ("the server is asleep; call wake_up first" if self._is_asleep else "")
        if trouble or self._limits is None:
            raise ServerError(trouble or NOT_STARTED, server=self.name, request_id=request_id)
        return self._limits

    async def _parts(
        self, prompt_ids: IntArray, params: SamplingParams, running: SGLangRequest, *, room: int
    ) -> AsyncGenerator[TokenChunk]:
        if not await self._running.send(running):
            yield TokenChunk([], [], weight_version=self._weight_version, stop_reason="aborted")
            return
        num_holds, connection = self._running.num_holds, self._connected
        body = generate_body(prompt_ids, params, rid=running.rid, max_new_tokens=room, stream=True)
        stops = frozenset(params.stop_token_ids if needs_own_stop(params) else ())
        held = HeldTokens(stop_token_ids=stops)
        async with aclosing(connection.stream("/generate", body, request_id=running.request_id)) as events:
            async for event in events:
                reply = self._read(event, num_seen=held.num_read, request_id=running.request_id)
                is_last = reply.chunk.stop_reason is not None
                if held.add(reply) and not is_last:
                    await connection.call("/abort_request", {"rid": running.rid})
                if not is_last and (held.is_cut or self._running.num_holds > num_holds):
                    continue
                for chunk in held.release(reply):
                    yield self._without_inexact_logprobs(chunk)
                if is_last:
                    return
        raise BadServerReply(
            "SGLang's stream ended before the completion did", server=self.name, request_id=running.request_id
        )

    def _read(self, event: Any, *, num_seen: int, request_id: str) -> GenerateReply:
        return read_reply(event, num_seen=num_seen, server=self.name, request_id=request_id)

    def _without_inexact_logprobs(self, chunk: TokenChunk) -> TokenChunk:
        return chunk if Ability.LOG_PROBS in self.abilities else replace(chunk, logprobs=None, extras={})

    @asynccontextmanager
    async def _paused(self, connection: SGLangConnection) -> AsyncGenerator[None]:
        """Pause the engine while the body runs."""
        with self._running.hold():
            try:
                await connection.call("/pause_generation", {"mode": "retract"}, timeout_s=CONTROL_TIMEOUT_S)
                yield
            finally:
                await run_shielded(
                    lambda: connection.call("/continue_generation", {}), timeout_s=CONTROL_TIMEOUT_S
                )

    async def _resume(self, tags: Iterable[str]) -> None:
        """Allocate memory again that `sleep` released."""
        tags = sorted(tags)
        if tags:
            await self._connected.call(
                "/resume_memory_occupation", {"tags": tags}, timeout_s=CONTROL_TIMEOUT_S
            )
            self._released.difference_update(tags)
