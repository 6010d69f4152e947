"""What a server has sampled of completions that are under way, so that it is not lost with the server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from agent_loop.distributed.wire import PackedCompletion
from agent_loop.errors import ServerError
from agent_loop.types import TokenChunk, TokenOutput

ASK_EVERY_S = 1.0

Parts = Mapping[int, tuple[int, PackedCompletion]]
"""By call: how many of the server's chunks are known now, and the tokens that are new."""


@dataclass(slots=True)
class _Known:
    num_chunks: int = 0
    chunks: list[TokenChunk] = field(default_factory=list[TokenChunk])


class Progress:
    """Asks a server for all of its client's running completions together, as long as there are any.

    Args:
        ask: Takes how many chunks are known of each call, and gives what is new.
    """

    def __init__(self, ask: Callable[[Mapping[int, int]], Awaitable[Parts]]) -> None:
        self._ask = ask
        self._known: dict[int, _Known] = {}
        self._asking: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self, call: int) -> Generator[list[TokenChunk]]:
        """Looks after one call meanwhile; gives the list of what is known of it."""
        known = self._known[call] = _Known()
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_again_and_again())
        try:
            yield known.chunks
        finally:
            del self._known[call]
            if not self._known:
                self._asking.cancel()
                self._asking = None

    async def _ask_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            try:
                parts = await self._ask({call: known.num_chunks for call, known in self._known.items()})
            except ServerError:  # the calls themselves find out what is wrong
                continue
            for call, (num_chunks, answer) in parts.items():
                known = self._known.get(call)
                if known is not None:
                    known.num_chunks = num_chunks
                    known.chunks += unfinished(answer)


def pack_unfinished(chunks: list[TokenChunk]) -> PackedCompletion:
    """Return the chunks of a completion that goes on, packed."""
    return PackedCompletion.pack(TokenOutput.from_chunks(chunks))


def unfinished(packed: PackedCompletion) -> list[TokenChunk]:
    """Return the chunks that `pack_unfinished` was given, joined by weight version."""
    return [replace(chunk, stop_reason=None) for chunk in packed.unpack().chunks]
