"""One completion, whichever servers it takes and however often it is broken off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from msgspec import structs

from agent_loop.attachments import Attachment
from agent_loop.servers.base import AsyncServerBase
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput, as_token_ids
from agent_loop.waits import note_progress


class Work:
    """One completion, whichever servers it takes."""

    output: TokenOutput
    """The whole of it, once a server has completed it."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: IntArray,
        request_id: str,
        attachments: Sequence[Attachment],
    ) -> None:
        self.params = params
        self.prompt_ids = prompt_ids
        self.request_id = request_id
        self.chunks: list[TokenChunk] = []
        """What came in parts, or from servers that died."""
        self.num_servers_lost = 0
        """Servers that died while they had this completion."""
        # A server that knows of no attachments need not take the argument.
        self._more: dict[str, Any] = {"attachments": attachments} if attachments else {}

    @property
    def num_tokens(self) -> int:
        """Tokens that came."""
        return sum(len(chunk.token_ids) for chunk in self.chunks) if self.chunks else 0

    @property
    def is_over(self) -> bool:
        """Nothing is left to be sampled."""
        return bool(self.chunks) and self.chunks[-1].stop_reason is not None

    async def take_whole(self, server: AsyncServerBase) -> TokenOutput:
        """Has a server complete it; what that made of it."""
        prompt_ids, params = self._rest()
        output = await server.generate(prompt_ids, params, self.request_id, **self._more)
        self.output = output
        if self.chunks:
            self.output = TokenOutput.from_chunks([*self.chunks, *TokenChunk.whole(output)])
        return output

    async def take_parts(self, server: AsyncServerBase) -> TokenOutput:
        """The same, and keeps each part as it comes. Where tokens come one after the other, the first part says how
        long it took, if the server does not."""
        clock = asyncio.get_running_loop().time
        first, began, took_s, num_parts = len(self.chunks), clock(), 0.0, 0
        async with aclosing(self.stream_on(server)) as chunks:
            async for chunk in chunks:
                self.chunks.append(chunk)
                note_progress()
                num_parts += bool(chunk.token_ids)
                if not took_s and num_parts:
                    took_s = clock() - began
                if num_parts == 2 and self.chunks[first].prefill_s is None:
                    self.chunks[first] = replace(self.chunks[first], prefill_s=took_s)
        self.output = TokenOutput.from_chunks(self.chunks)
        return TokenOutput.from_chunks(self.chunks[first:]) if first else self.output

    def stream_on(self, server: AsyncServerBase) -> AsyncGenerator[TokenChunk]:
        prompt_ids, params = self._rest()
        return server.stream(prompt_ids, params, self.request_id, **self._more)

    def set_aside(self) -> None:
        """Whoever goes on with it computes the prefix again, unless all that is wanted came before."""
        self.num_servers_lost += 1
        if self.is_over:
            return
        if self.params.max_tokens is not None and self.num_tokens >= self.params.max_tokens:
            version = self.chunks[-1].weight_version
            self.chunks.append(TokenChunk([], [], weight_version=version, stop_reason="length"))
        else:
            self.chunks.append(TokenChunk([], [], num_preempted=1))

    def _rest(self) -> tuple[IntArray, SamplingParams]:
        """What is still to be done."""
        if not self.chunks:
            return self.prompt_ids, self.params
        sampled = [token for chunk in self.chunks for token in chunk.token_ids]
        max_tokens = None if self.params.max_tokens is None else self.params.max_tokens - len(sampled)
        prompt_ids = as_token_ids([*self.prompt_ids.tolist(), *sampled])
        return prompt_ids, structs.replace(self.params, max_tokens=max_tokens)
