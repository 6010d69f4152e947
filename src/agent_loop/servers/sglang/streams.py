"""Tokens of a streamed completion that were read and not yet returned."""

from __future__ import annotations

from dataclasses import replace

from agent_loop.servers.sglang.requests import GenerateReply, stamp
from agent_loop.types import TokenChunk


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
