"""In-flight request: one completion, sampled by one server or by several in succession."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from agent_loop.chat.detokenizer import StopTextEnd
from agent_loop.errors import BadServerReply, ServerDied
from agent_loop.runtime.activity import note_progress
from agent_loop.servers.base import AsyncServerBase, refuse_params_of_request
from agent_loop.servers.reply_check import ReplyCheck, bad_reply
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput, as_token_ids

MAX_EMPTY_CHUNKS = 10_000
"""Number of consecutive chunks without a token after which a stream fails."""


class InFlightRequest:
    """One completion and its tokens so far. Another server can resume the completion from those tokens.

    `ReplyCheck` checks every reply here before other code sees it: completions, streamed chunks, and the chunks of
    servers that died.

    Args:
        params: How to sample.
        prompt_ids: The whole context, shape [num_tokens].
        session: Id of the session.
        attachments: Everything attached to the context, counted from its first token, in order.
        check: Checks the replies; None checks without a vocabulary size.
        is_streamed: Whether servers stream the tokens as they are sampled.
        on_chunk: Called with each chunk of a streamed completion.
        stop_text_end: Ends a streamed completion with a stop text.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: IntArray,
        session: str,
        attachments: Sequence[Attachment],
        *,
        check: ReplyCheck | None = None,
        is_streamed: bool = False,
        on_chunk: Callable[[TokenChunk], None] | None = None,
        stop_text_end: StopTextEnd | None = None,
    ) -> None:
        self.params = params
        self.prompt_ids = prompt_ids
        self.session = session
        self.is_streamed = is_streamed
        self.chunks: list[TokenChunk] = []
        """Chunks that were streamed, or that servers sampled before they died."""
        self.num_tokens = 0
        """Number of tokens in `chunks`."""
        self.num_servers_lost = 0
        """Number of servers that died during this request."""
        self._output: TokenOutput | None = None
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
        return self._output is not None or (bool(self.chunks) and self.chunks[-1].stop_reason is not None)

    @property
    def output(self) -> TokenOutput:
        """The whole completion, once the request is finished."""
        if self._output is None:
            self._output = TokenOutput.from_chunks(self.chunks)
        return self._output

    def add(self, chunk: TokenChunk) -> None:
        """Add a checked chunk, or its part up to the end of a stop text."""
        if self._stop_text_end is not None:
            chunk = self._stop_text_end.cut(chunk)
        self.chunks.append(chunk)
        self.num_tokens += len(chunk.token_ids)
        if self._on_chunk is not None:
            self._on_chunk(chunk)

    async def generate_from(self, server: AsyncServerBase) -> TokenOutput:
        """Sample the rest of the completion on a server. Return the tokens that this server sampled.

        Raises:
            BadServerReply: The reply is not a completion of the prompt.
        """
        attempt = self._begin_attempt()
        prompt_ids, params = self._rest()
        refuse_params_of_request(params, abilities=server.abilities, server=server.name)
        reply = await server.generate(prompt_ids, params, self.session, **self._more)
        output = self._check.output(
            reply, server=server.name, request_id=self.session, max_tokens=params.max_tokens
        )
        self._refuse_late_reply(attempt, server)
        if self.params.json_schema:
            output = TokenOutput.from_chunks([self._with_forced(chunk) for chunk in output.chunks])
        self._output = TokenOutput.from_chunks([*self.chunks, *output.chunks]) if self.chunks else output
        return output

    async def stream_from(self, server: AsyncServerBase) -> TokenOutput:
        """Stream the rest of the completion from a server. Return the tokens that this server sampled.

        If the server does not report `prefill_s`, the time to its first token is recorded.

        Raises:
            BadServerReply: A chunk is not a part of a completion of the prompt, or the stream ended too early.
        """
        attempt, clock = self._begin_attempt(), asyncio.get_running_loop().time
        first, began, took_s, num_parts = len(self.chunks), clock(), 0.0, 0
        async with aclosing(self.stream_rest(server)) as chunks:
            async for chunk in chunks:
                self._refuse_late_reply(attempt, server)
                self.add(chunk)
                note_progress()
                num_parts += bool(chunk.token_ids)
                if not took_s and num_parts:
                    took_s = clock() - began
                if num_parts == 2 and self.chunks[first].prefill_s is None:
                    self.chunks[first] = replace(self.chunks[first], prefill_s=took_s)
                if self.is_finished and chunk.stop_reason is None:
                    break  # at a stop text
        self._refuse_late_reply(attempt, server)
        if not self.is_finished:
            raise self._bad("the stream ended without a stop reason", server.name)
        return TokenOutput.from_chunks(self.chunks[first:]) if first else self.output

    async def stream_rest(self, server: AsyncServerBase) -> AsyncGenerator[TokenChunk]:
        """Yield checked chunks of the rest of the completion. The caller adds them.

        Raises:
            BadServerReply: A chunk is not a part of a completion of the prompt.
        """
        prompt_ids, params = self._rest()
        refuse_params_of_request(params, abilities=server.abilities, server=server.name)
        stream: Any = server.stream(prompt_ids, params, self.session, **self._more)
        if not isinstance(stream, AsyncGenerator):
            if inspect.iscoroutine(stream):
                stream.close()
            raise self._bad(f"stream returned a {type(stream).__name__}, not an async generator", server.name)
        num_empty = 0
        async with aclosing(cast("AsyncGenerator[Any]", stream)) as chunks:
            async for reply in chunks:
                chunk = self._checked(reply, server.name)
                num_empty = 0 if chunk.token_ids else num_empty + 1
                if num_empty > MAX_EMPTY_CHUNKS:
                    raise self._bad(f"stream yielded {MAX_EMPTY_CHUNKS} chunks without a token", server.name)
                yield chunk

    def add_partial(self, chunks: Any, *, server: str) -> None:
        """Add the tokens that a server sampled before it died.

        Raises:
            BadServerReply: The chunks are invalid. None of them was added.
        """
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
        self._begin_attempt()
        self._output = None
        if self.is_finished:
            return
        version = self.chunks[-1].weight_version if self.chunks else 0
        if self.params.max_tokens is not None and self.num_tokens >= self.params.max_tokens:
            self.add(TokenChunk([], [], weight_version=version, stop_reason="length"))
        else:
            self.chunks.append(TokenChunk([], [], weight_version=version, num_preempted=1))

    def abort(self, *, weight_version: int) -> None:
        """Finish the request with the tokens sampled so far and the stop reason `aborted`."""
        self.add(TokenChunk([], [], weight_version=weight_version, stop_reason="aborted"))

    def _begin_attempt(self) -> int:
        self._attempt += 1
        return self._attempt

    def _refuse_late_reply(self, attempt: int, server: AsyncServerBase) -> None:
        """Raise `ServerDied` if the request was resumed elsewhere because the server ignored its cancellation."""
        if attempt != self._attempt:
            raise ServerDied(
                "its reply came after the request was moved to another server",
                server=server.name,
                request_id=self.session,
            )

    def _checked(self, chunk: Any, server: str, *, after: Sequence[TokenChunk] = ()) -> TokenChunk:
        num_before = self.num_tokens + sum(len(c.token_ids) for c in after)
        limit = None if self.params.max_tokens is None else self.params.max_tokens - num_before
        checked = self._check.chunk(chunk, server=server, request_id=self.session, max_tokens=limit)
        if self.is_finished or (after and after[-1].stop_reason is not None):
            raise self._bad("it sent a chunk after its stop reason", server)
        return self._with_forced(checked)

    def _with_forced(self, chunk: TokenChunk) -> TokenChunk:
        """Mark the tokens that the request's grammar forced. One rule for all servers."""
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
