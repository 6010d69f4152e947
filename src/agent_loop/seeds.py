"""Seeds of completions and trajectories. They follow from what they are for, not from when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b

from agent_loop.types import IntArray

SEED_BYTES = 8
"""Seeds have one bit less, for engines that take signed integers."""


def derived_seed(*parts: int | str | bytes) -> int:
    """Return a seed of 63 bits: a hash of the parts in their order, the same in every process."""
    digest = blake2b(digest_size=SEED_BYTES)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(SEED_BYTES, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little") >> 1


class CompletionSeeds:
    """The seeds of one trajectory's completions.

    A completion's seed depends on the tokens before it, so that turns, branches and sub-agents may ask in any order.
    Completions of equal tokens are numbered.

    Args:
        seed: Of the trajectory.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_asked: Counter[bytes] = Counter()

    def next(self, context: IntArray) -> int:
        """Return the seed of the next completion of a context, shape [num_tokens]."""
        context_hash = blake2b(context.tobytes(), digest_size=SEED_BYTES).digest()
        number = self._num_asked[context_hash]
        self._num_asked[context_hash] += 1
        return derived_seed(self._seed, context_hash, number)


def trajectory_seed(*parts: int | str) -> int | None:
    """Return a seed of the trajectory that the running code belongs to, for randomness of tools and interactions.

    It is the same whenever the trajectory is run with the same settings, and after an interruption.

    Args:
        parts: What the seed is for, so that two uses do not draw alike.

    Returns:
        None outside of trajectories, and in those that have no seed.
    """
    seed = _CURRENT.get()
    return None if seed is None else derived_seed(seed, *parts)


@contextmanager
def seeded_trajectory(seed: int | None) -> Generator[None]:
    """Let `trajectory_seed` derive from this seed in the body, tasks and threads included."""
    token = _CURRENT.set(seed)
    try:
        yield
    finally:
        _CURRENT.reset(token)


_CURRENT: ContextVar[int | None] = ContextVar("agent_loop_trajectory_seed", default=None)
