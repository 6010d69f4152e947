"""What the servers of a pool did, as far as their answers tell."""

from __future__ import annotations

from msgspec import Struct

from agent_loop.types import TokenOutput


class ServerUse(Struct, frozen=True):
    """What came of some completions."""

    num_turns: int = 0
    """Completions that ended."""
    num_sampled_tokens: int = 0
    num_recomputed_tokens: int = 0
    """Of contexts that a server had computed before, and had dropped: between two turns, or when it set a request
    aside."""

    def with_completion(
        self, output: TokenOutput, *, num_prompt_tokens: int, num_known_tokens: int
    ) -> ServerUse:
        """With one more.

        Args:
            output: As one server gave it.
            num_known_tokens: Of the prompt, those that this server has computed or sampled before.
        """
        num_cached = output.num_cached_tokens
        num_dropped = 0 if num_cached is None else max(num_known_tokens - num_cached, 0)
        return ServerUse(
            self.num_turns + 1,
            self.num_sampled_tokens + len(output.token_ids),
            self.num_recomputed_tokens + num_dropped + output.num_preempted * num_prompt_tokens,
        )

    def plus(self, other: ServerUse, *, sign: int = 1) -> ServerUse:
        """Both together."""
        return ServerUse(
            num_turns=self.num_turns + sign * other.num_turns,
            num_sampled_tokens=self.num_sampled_tokens + sign * other.num_sampled_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens + sign * other.num_recomputed_tokens,
        )

    def since(self, earlier: ServerUse) -> ServerUse:
        """What came after an earlier count."""
        return self.plus(earlier, sign=-1)
