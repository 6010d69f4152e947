"""In-flight requests, and the leases under which servers sample them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, cast

from agent_loop.chat.detokenizer import StopTextEnd
from agent_loop.errors import BadServerReply, SamplingParamsError, ServerDied, ServerError, ServerTimeout
from agent_loop.runtime.activity import WaitKind, note_progress, waiting_for
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.user_code import run_bounded
from agent_loop.servers.balancer import SlotRequest
from agent_loop.servers.base import Ability, AsyncServerBase, refuse_params_of_request
from agent_loop.servers.reply_check import ReplyCheck, bad_reply
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput, as_token_ids

LOSS_GRACE_S = 2.0
"""How long the requests of a lost server may still end. A server that died fails each with its tokens so far."""


class InFlightRequest:
    """One completion and its tokens so far. Another server can resume the completion from those tokens.

    `ReplyCheck` checks every chunk here before other code sees it, also those of servers that died.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: IntArray,
        session: str,
        attachments: Sequence[Attachment] = (),
        *,
        check: ReplyCheck | None = None,
        on_chunk: Callable[[TokenChunk], None] | None = None,
        stop_text_end: StopTextEnd | None = None,
    ) -> None:
        self.params = params
        self.prompt_ids = prompt_ids
        self.session = session
        self.chunks: list[TokenChunk] = []
        """Chunks so far, of all servers."""
        self.num_tokens = 0
        """Number of tokens in `chunks`."""
        self.num_servers_lost = 0
        """Number of servers that died during this request."""
        self._attempt = 0
        """Number of the current attempt. Replies to earlier attempts are rejected."""
        self._check = check or ReplyCheck()
        self._on_chunk = on_chunk
        self._stop_text_end = stop_text_end
        # A server without attachments need not have the argument.
        self._more: dict[str, Any] = {"attachments": attachments} if attachments else {}

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to sample."""
        return bool(self.chunks) and self.chunks[-1].stop_reason is not None

    @property
    def output(self) -> TokenOutput:
        """The completion so far."""
        return TokenOutput.from_chunks(self.chunks)

    def add(self, chunk: TokenChunk) -> None:
        """Add a checked chunk, or its part up to the end of a stop text."""
        if self._stop_text_end is not None:
            chunk = self._stop_text_end.cut(chunk)
        self.chunks.append(chunk)
        self.num_tokens += len(chunk.token_ids)
        if self._on_chunk is not None:
            self._on_chunk(chunk)

    async def sample_on(self, server: AsyncServerBase) -> TokenOutput:
        """Sample the rest of the completion on a server. Return the tokens that this server sampled.

        If a server that streams does not report `prefill_s`, the time to its first token is recorded.
        """
        self._attempt += 1
        attempt, first, clock = self._attempt, len(self.chunks), asyncio.get_running_loop().time
        began, is_timed = clock(), Ability.STREAMING in server.abilities
        async with aclosing(self.stream_rest(server)) as chunks:
            async for chunk in chunks:
                if attempt != self._attempt:
                    raise ServerDied(
                        "its reply came after the request was moved to another server",
                        server=server.name,
                        request_id=self.session,
                    )
                if is_timed and chunk.token_ids:
                    is_timed = False
                    if chunk.prefill_s is None:
                        chunk = replace(chunk, prefill_s=clock() - began)
                self.add(chunk)
                note_progress()
                if self.is_finished and chunk.stop_reason is None:
                    break  # at a stop text
        if not self.is_finished:
            raise self._bad("the stream ended without a stop reason", server.name)
        return TokenOutput.from_chunks(self.chunks[first:])

    async def stream_rest(self, server: AsyncServerBase) -> AsyncGenerator[TokenChunk]:
        """Yield checked chunks of the rest of the completion. The caller adds them."""
        prompt_ids, params = self._rest()
        refuse_params_of_request(params, abilities=server.abilities, server=server.name)
        stream: Any = server.stream(prompt_ids, params, self.session, **self._more)
        if not isinstance(stream, AsyncGenerator):
            if inspect.iscoroutine(stream):
                stream.close()
            raise self._bad(f"stream returned a {type(stream).__name__}, not an async generator", server.name)
        async with aclosing(cast("AsyncGenerator[Any]", stream)) as chunks:
            async for reply in chunks:
                yield self._checked(reply, server.name)

    def add_partial(self, chunks: Any, *, server: str) -> None:
        """Add the tokens that a server sampled before it died."""
        if not isinstance(chunks, Iterable):
            raise self._bad(f"the chunks of its ServerDied error are a {type(chunks).__name__}", server)
        checked: list[TokenChunk] = []
        for chunk in chunks:  # pyright: ignore[reportUnknownVariableType]
            checked.append(self._checked(chunk, server, after=checked))
        for chunk in checked:
            if not self.is_finished:  # by a stop text
                self.add(chunk)

    def note_interruption(self) -> None:
        """Record an interruption. It counts as a preemption, because the next server computes the prefix again.

        Finishes the request if it already has `max_tokens` tokens.
        """
        self._attempt += 1
        if self.is_finished:
            return
        if self.params.max_tokens is not None and self.num_tokens >= self.params.max_tokens:
            self.add(self._empty_chunk(stop_reason="length"))
        else:
            self.chunks.append(self._empty_chunk(num_preempted=1))

    def abort(self) -> None:
        """Finish the request with the tokens sampled so far and the stop reason `aborted`."""
        self.add(self._empty_chunk(stop_reason="aborted"))

    def _empty_chunk(self, **fields: Any) -> TokenChunk:
        version = self.chunks[-1].weight_version if self.chunks else 0
        return TokenChunk([], [], weight_version=version, **fields)

    def _checked(self, reply: Any, server: str, *, after: Sequence[TokenChunk] = ()) -> TokenChunk:
        num_before = self.num_tokens + sum(len(chunk.token_ids) for chunk in after)
        limit = None if self.params.max_tokens is None else self.params.max_tokens - num_before
        chunk = self._check.chunk(reply, server=server, request_id=self.session, max_tokens=limit)
        if self.is_finished or (after and after[-1].stop_reason is not None):
            raise self._bad("it sent a chunk after its stop reason", server)
        return chunk.with_forced() if self.params.json_schema else chunk

    def _bad(self, what: str, server: str) -> BadServerReply:
        return bad_reply(what, server=server, request_id=self.session)

    def _rest(self) -> tuple[IntArray, SamplingParams]:
        """Return the prompt and the parameters for the remaining tokens."""
        if not self.chunks:
            return self.prompt_ids, self.params
        sampled = [token for chunk in self.chunks for token in chunk.token_ids]
        prompt_ids = as_token_ids([*self.prompt_ids.tolist(), *sampled])
        return prompt_ids, self.params.after(len(sampled))


class Lease:
    """Lease on a server for one request. Single use; `ServerPool.complete` acquires and releases it."""

    server: AsyncServerBase | None = None
    """The leased server, which the pool sets; None while the request is queued."""
    output: TokenOutput | None = None
    """Tokens that this server sampled, once it has completed the request."""
    num_known_tokens: int = 0
    """Number of prompt tokens that the server has computed or sampled before."""
    _timeout: asyncio.Timeout | None = None
    _loss: ServerDied | None = None

    def __init__(
        self, request: InFlightRequest, slot_request: SlotRequest, *, timeout_s: float | None
    ) -> None:
        self.request = request
        self.slot_request = slot_request
        self._timeout_s = timeout_s or 0.0
        self._clock = asyncio.get_running_loop().time
        self.ends_at = None if timeout_s is None else self._clock() + timeout_s

    async def sample(self) -> None:
        """Sample the rest of the request on the leased server.

        The server's code runs in a separate task, so that a server that mishandles its task cannot affect the caller.
        """
        request, server = self.request, self.server
        assert server is not None, "the pool grants the lease first"
        if self._loss is not None:
            raise self._loss
        details: dict[str, Any] = {"num_prompt_tokens": self.slot_request.num_prompt_tokens}
        timeout = self._timeout = asyncio.timeout_at(self.ends_at)
        try:
            with waiting_for(WaitKind.GENERATE, server.name, details=details):
                async with timeout:
                    sample = partial(request.sample_on, server)
                    self.output = await run_bounded(sample, timeout_s=None, name=f"server {server.name!r}")
        except (ServerError, SamplingParamsError):
            raise
        except Exception as error:
            if timeout.expired():
                raise self._loss or self._time_limit_error(server.name) from None
            raise bad_reply(
                f"it raised {describe_error(error)}", server=server.name, request_id=request.session
            ) from error
        finally:
            self._timeout = None
        details |= {
            "num_tokens": len(self.output.token_ids),
            "num_cached_tokens": self.output.num_cached_tokens,
            "num_preempted": self.output.num_preempted,
            "prefill_s": self.output.prefill_s,
        }

    def lose_server(self, reason: str) -> None:
        """Make `sample` raise `ServerDied` soon. Called by the pool when it has lost the server."""
        assert self.server is not None
        self._loss = ServerDied(reason, server=self.server.name, request_id=self.request.session)
        if self._timeout is not None and not self._timeout.expired():
            ends_at = self._clock() + LOSS_GRACE_S
            self._timeout.reschedule(ends_at if self.ends_at is None else min(ends_at, self.ends_at))

    def _time_limit_error(self, server: str) -> ServerTimeout:
        return ServerTimeout(
            f"the completion took longer than {self._timeout_s:g} s; raise rollout.request_timeout_s, or check "
            "what delays the server",
            server=server,
            request_id=self.request.session,
        )
