"""A completion that comes in parts."""

from __future__ import annotations

from agent_loop.servers.sglang.requests import Part, to_chunks
from agent_loop.types import TokenChunk


class HeldTokens:
    """What came of one completion and was not yet handed out."""

    def __init__(self, *, stop_token_ids: frozenset[int]) -> None:
        """Args: stop_token_ids: Those that the engine does not look for; the completion is cut after the first."""
        self.num_read = 0
        """Tokens that came, those beyond the cut included."""
        self.is_cut = False
        self._stops = stop_token_ids
        self._num_released = 0
        self._token_ids: list[int] = []
        self._log_probs: list[float] = []

    def take(self, part: Part) -> bool:
        """Adds a part; tells whether the completion was cut in it."""
        self.num_read += len(part.token_ids)
        if self.is_cut:
            return False
        for token, log_prob in zip(part.token_ids, part.log_probs, strict=True):
            self._token_ids.append(token)
            self._log_probs.append(log_prob)
            if token in self._stops:
                self.is_cut = True
                break
        return self.is_cut

    def release(self, part: Part) -> list[TokenChunk]:
        """All that is held, stamped as the part says that came last."""
        chunks = to_chunks(
            self._token_ids,
            self._log_probs,
            first=self._num_released,
            weight_versions=part.weight_versions,
            stop_reason="stop" if self.is_cut else part.stop_reason,
            num_preempted=part.num_retractions if part.stop_reason else 0,
            num_cached_tokens=part.num_cached_tokens if part.stop_reason else None,
        )
        self._num_released += len(self._token_ids)
        self._token_ids, self._log_probs = [], []
        return chunks
