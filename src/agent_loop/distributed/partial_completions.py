"""Tokens of in-flight completions at a server, polled so that they survive the server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from agent_loop.errors import ServerError
from agent_loop.runtime.concurrency import BackgroundTasks
from agent_loop.trajectory.codec import decode_completion
from agent_loop.types import TokenChunk

POLL_INTERVAL_S = 1.0

PartialCompletions = Mapping[str, tuple[int, bytes]]
"""By call id: the number of chunks that the server has so far, and the encoded tokens of the new chunks."""


@dataclass(slots=True)
class _KnownChunks:
    num_chunks: int = 0
    """Chunks as the server counts them. `chunks` joins chunks of one weight version."""
    chunks: list[TokenChunk] = field(default_factory=list[TokenChunk])


class PartialCompletionPoller:
    """Polls a server for all in-flight completions of a client, as long as there are any."""

    def __init__(self, poll: Callable[[Mapping[str, int]], Awaitable[PartialCompletions]]) -> None:
        self._poll = poll
        self._known: dict[str, _KnownChunks] = {}
        self._tasks = BackgroundTasks()
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def polling(self, call_id: str) -> Generator[list[TokenChunk]]:
        """Poll the chunks of a call while the body runs. Yield the list that they are appended to.

        Awaits nothing at the end: a call that fails with its chunks could be aborted during a wait, and lose them.
        """
        known = self._known[call_id] = _KnownChunks()
        if self._task is None or self._task.done():
            self._task = self._tasks.start(self._poll_forever())
        try:
            yield known.chunks
        finally:
            del self._known[call_id]
            if not self._known:
                self._task.cancel()
                self._task = None

    async def close(self) -> None:
        """Stop polling, and wait until it has ended."""
        await self._tasks.close()

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                partial = await self._poll({id: known.num_chunks for id, known in self._known.items()})
            except ServerError:  # raised to the callers by their own requests
                continue
            for call_id, (num_chunks, new_chunks) in partial.items():
                known = self._known.get(call_id)
                if known is not None:
                    known.num_chunks = num_chunks
                    chunks = decode_completion(new_chunks).chunks
                    known.chunks += [replace(chunk, stop_reason=None) for chunk in chunks]
