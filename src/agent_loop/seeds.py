"""Seeds of completions and trajectories. They depend on their purpose and not on the order of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b

from agent_loop.types import IntArray

SEED_BYTES = 8
"""Size of a hash. Seeds have one bit less, for engines that accept signed integers only."""


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

    A completion's seed depends on the tokens before it, so the order in which turns, branches and sub-agents request
    completions does not matter. Completions of equal contexts are numbered.

    Args:
        seed: Seed of the trajectory.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_requested: Counter[bytes] = Counter()

    def next(self, context: IntArray) -> int:
        """Return the seed of the next completion of a context, shape [num_tokens]."""
        context_hash = blake2b(context.tobytes(), digest_size=SEED_BYTES).digest()
        number = self._num_requested[context_hash]
        self._num_requested[context_hash] += 1
        return derived_seed(self._seed, context_hash, number)


def trajectory_seed(*parts: int | str) -> int | None:
    """Return a seed of the trajectory that the running code belongs to, for randomness of tools and interactions.

    The seed is the same whenever the trajectory runs with the same settings, also after an interruption.

    Args:
        parts: Purpose of the seed. Different purposes get different seeds.

    Returns:
        None outside of trajectories, and in trajectories without a seed.
    """
    seed = _CURRENT.get()
    return None if seed is None else derived_seed(seed, *parts)


@contextmanager
def seeded_trajectory(seed: int | None) -> Generator[None]:
    """Derive the seeds of `trajectory_seed` from this seed within the body, including its tasks and threads."""
    token = _CURRENT.set(seed)
    try:
        yield
    finally:
        _CURRENT.reset(token)


_CURRENT: ContextVar[int | None] = ContextVar("agent_loop_trajectory_seed", default=None)
