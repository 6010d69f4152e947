"""One completion, whichever servers it takes and however often it is broken off."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from agent_loop.errors import BadServerReply, ServerDied
from agent_loop.runtime.activity import note_progress
from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.reply_check import ReplyCheck, bad_reply
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput, as_token_ids

MAX_EMPTY_CHUNKS = 10_000
"""A stream that yields so many chunks without a token is given up: it would go on for ever."""


class Work:
    """One completion, whichever servers it takes.

    This is the door through which replies come in: whatever a server returns, yields, or leaves behind when it dies is
    checked here, by `ReplyCheck`, before anything else sees it.
    """

    output: TokenOutput
    """The whole of it, once a server has completed it."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: IntArray,
        request_id: str,
        attachments: Sequence[Attachment],
        *,
        check: ReplyCheck | None = None,
        on_chunk: Callable[[TokenChunk], None] | None = None,
    ) -> None:
        """Args:
        check: What replies are held to; None knows no vocabulary.
        on_chunk: Called with each chunk as it comes.
        """
        self.params = params
        self.prompt_ids = prompt_ids
        self.request_id = request_id
        self.chunks: list[TokenChunk] = []
        """What came in parts, or from servers that died."""
        self.num_servers_lost = 0
        """Servers that died while they had this completion."""
        self.num_tokens = 0
        """Tokens in `chunks`."""
        self._attempt = 0
        """Counts the servers that were asked: what one says that was given up since is not heard."""
        self._check = check or ReplyCheck()
        self._on_chunk = on_chunk
        # A server that knows of no attachments need not take the argument.
        self._more: dict[str, Any] = {"attachments": attachments} if attachments else {}

    @property
    def is_over(self) -> bool:
        """Nothing is left to be sampled."""
        return bool(self.chunks) and self.chunks[-1].stop_reason is not None

    def add(self, chunk: TokenChunk) -> None:
        """Add a chunk that was checked."""
        self.chunks.append(chunk)
        self.num_tokens += len(chunk.token_ids)
        if self._on_chunk is not None:
            self._on_chunk(chunk)

    def add_left_behind(self, chunks: Any, *, server: str) -> None:
        """Add what a server that died is known to have sampled.

        Raises:
            BadServerReply: The chunks cannot be used; none of them was added.
        """
        if not isinstance(chunks, Iterable):
            raise self._bad("it died and left something that is not chunks", server)
        checked: list[TokenChunk] = []
        for chunk in chunks:  # pyright: ignore[reportUnknownVariableType]
            checked.append(self._checked(chunk, server, after=checked))
        for chunk in checked:
            self.add(chunk)

    async def take_whole(self, server: AsyncServerBase) -> TokenOutput:
        """Have a server complete it at once; return what that server made of it.

        Raises:
            BadServerReply: The server returned something that is not a completion of the prompt.
        """
        attempt = self._begin_attempt()
        prompt_ids, params = self._rest()
        reply = await server.generate(prompt_ids, params, self.request_id, **self._more)
        output = self._check.output(
            reply, server=server.name, request_id=self.request_id, max_tokens=params.max_tokens
        )
        self._refuse_if_given_up(attempt, server)
        self.output = output
        if self.chunks:
            self.output = TokenOutput.from_chunks([*self.chunks, *output.chunks])
        return output

    async def take_parts(self, server: AsyncServerBase) -> TokenOutput:
        """Have a server complete it in parts, and keep each part as it comes; return what that server made of it.

        Where tokens come one after the other, the first part says how long it took, if the server does not.

        Raises:
            BadServerReply: The server yielded something that is not a part of a completion of the prompt, or stopped
                before the completion ended.
        """
        attempt, clock = self._begin_attempt(), asyncio.get_running_loop().time
        first, began, took_s, num_parts = len(self.chunks), clock(), 0.0, 0
        async with aclosing(self.stream_on(server)) as chunks:
            async for chunk in chunks:
                self._refuse_if_given_up(attempt, server)
                self.add(chunk)
                note_progress()
                num_parts += bool(chunk.token_ids)
                if not took_s and num_parts:
                    took_s = clock() - began
                if num_parts == 2 and self.chunks[first].prefill_s is None:
                    self.chunks[first] = replace(self.chunks[first], prefill_s=took_s)
        self._refuse_if_given_up(attempt, server)
        if not self.is_over:
            raise self._bad("its stream ended without a stop reason", server.name)
        self.output = TokenOutput.from_chunks(self.chunks)
        return TokenOutput.from_chunks(self.chunks[first:]) if first else self.output

    async def stream_on(self, server: AsyncServerBase) -> AsyncGenerator[TokenChunk]:
        """Yield checked parts of what is left of it.

        Raises:
            BadServerReply: The server yielded something that is not a part of a completion of the prompt.
        """
        prompt_ids, params = self._rest()
        stream: Any = server.stream(prompt_ids, params, self.request_id, **self._more)
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
                    raise self._bad(f"it yielded {MAX_EMPTY_CHUNKS} chunks without a token", server.name)
                yield chunk

    def set_aside(self) -> None:
        """Whoever goes on with it computes the prefix again, unless all that is wanted came before."""
        self.num_servers_lost += 1
        self._begin_attempt()
        if self.is_over:
            return
        version = self.chunks[-1].weight_version if self.chunks else 0
        if self.params.max_tokens is not None and self.num_tokens >= self.params.max_tokens:
            self.add(TokenChunk([], [], weight_version=version, stop_reason="length"))
        else:
            self.chunks.append(TokenChunk([], [], weight_version=version, num_preempted=1))

    def _begin_attempt(self) -> int:
        self._attempt += 1
        return self._attempt

    def _refuse_if_given_up(self, attempt: int, server: AsyncServerBase) -> None:
        """Keep out what a server says that swallowed its cancellation: the completion goes on elsewhere."""
        if attempt != self._attempt:
            raise ServerDied(
                "it was given up before it replied", server=server.name, request_id=self.request_id
            )

    def _checked(self, chunk: Any, server: str, *, after: Sequence[TokenChunk] = ()) -> TokenChunk:
        num_before = self.num_tokens + sum(len(c.token_ids) for c in after)
        limit = None if self.params.max_tokens is None else self.params.max_tokens - num_before
        checked = self._check.chunk(chunk, server=server, request_id=self.request_id, max_tokens=limit)
        if self.is_over or (after and after[-1].stop_reason is not None):
            raise self._bad("it went on after its stop reason", server)
        return checked

    def _bad(self, what: str, server: str) -> BadServerReply:
        return bad_reply(what, server=server, request_id=self.request_id)

    def _rest(self) -> tuple[IntArray, SamplingParams]:
        """Return the prompt and the parameters of what is still to be sampled."""
        if not self.chunks:
            return self.prompt_ids, self.params
        sampled = [token for chunk in self.chunks for token in chunk.token_ids]
        prompt_ids = as_token_ids([*self.prompt_ids.tolist(), *sampled])
        return prompt_ids, self.params.after(len(sampled))
