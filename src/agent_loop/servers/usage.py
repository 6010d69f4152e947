"""Counters of the completions that a pool's servers returned."""

from __future__ import annotations

from msgspec import Struct

from agent_loop.types import TokenOutput


class ServerUsage(Struct, frozen=True):
    """Totals over completions."""

    num_turns: int = 0
    """Number of completions."""
    num_sampled_tokens: int = 0
    num_recomputed_tokens: int = 0
    """Number of context tokens that a server computed again, after a cache eviction or a preemption."""

    def with_completion(
        self, output: TokenOutput, *, num_prompt_tokens: int, num_known_tokens: int
    ) -> ServerUsage:
        """Return the totals with one more completion.

        Args:
            output: The completion of one server.
            num_known_tokens: Number of prompt tokens that this server has computed or sampled before.
        """
        num_cached = output.num_cached_tokens
        num_dropped = 0 if num_cached is None else max(num_known_tokens - num_cached, 0)
        return ServerUsage(
            self.num_turns + 1,
            self.num_sampled_tokens + len(output.token_ids),
            self.num_recomputed_tokens + num_dropped + output.num_preempted * num_prompt_tokens,
        )

    def plus(self, other: ServerUsage, *, sign: int = 1) -> ServerUsage:
        """Return the sum of both totals."""
        return ServerUsage(
            num_turns=self.num_turns + sign * other.num_turns,
            num_sampled_tokens=self.num_sampled_tokens + sign * other.num_sampled_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens + sign * other.num_recomputed_tokens,
        )

    def since(self, earlier: ServerUsage) -> ServerUsage:
        """Return the difference to an earlier total."""
        return self.plus(earlier, sign=-1)
