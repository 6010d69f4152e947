"""The server under check, and what every check asks of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import numpy as np

from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.servers.check.reference import Reference
from agent_loop.testing.checks import CheckFailed, require
from agent_loop.types import IntArray, SamplingParams, TokenOutput, as_token_ids

POLL_S = 0.02
NUM_TRIALS = 3
"""Of what is told by the clock: a busy machine may spoil one."""
MOST_OF_IT = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A server, and how to ask it things."""

    server: AsyncServerBase
    vocab_size: int
    max_model_len: int
    reference: Reference | None
    tolerance: float
    """Of log-probs, in nats."""
    long_tokens: int
    """Tokens of a completion that is long enough to be interrupted."""
    _sessions: count[int]

    def prompt(self, num_tokens: int, *, seed: int = 0) -> IntArray:
        """Random tokens, the same for the same arguments."""
        random = np.random.default_rng([seed, num_tokens])
        return random.integers(0, self.vocab_size, num_tokens, dtype=np.int32)

    def session(self) -> str:
        """A request id that was not used before."""
        return f"check-{next(self._sessions)}"

    async def ask(
        self, prompt_ids: IntArray | Sequence[int], *, session: str | None = None, **params: Any
    ) -> TokenOutput:
        """One completion in a session of its own, which is ended afterwards, or in the given one, which is not."""
        prompt_ids = as_token_ids(prompt_ids)
        request_id = session or self.session()
        try:
            return await self.server.generate(prompt_ids, SamplingParams(**params), request_id)
        finally:
            if session is None:
                self.server.end_session(request_id)

    async def greedy(
        self, prompt_ids: IntArray | Sequence[int], num_tokens: int, *, session: str | None = None
    ) -> list[int]:
        """The likeliest continuation, not ended by end tokens."""
        output = await self.ask(
            prompt_ids, session=session, temperature=0.0, max_tokens=num_tokens, ignore_eos=True
        )
        return output.token_ids

    def require_same(self, got: Sequence[int], wanted: Sequence[int], *, prompt: IntArray, what: str) -> None:
        """Fails unless two greedy completions are the same, up to what comes after a near tie."""
        if list(got) == list(wanted):
            return
        reason = ""
        if self.reference is not None and len(got) == len(wanted):
            reason = self.reference.disagreement(prompt.tolist(), got)
            if not reason:
                return
        raise CheckFailed(f"{what}: got {list(got)}, not {list(wanted)}; {reason}".rstrip("; "))

    async def until_idle(self, what: str) -> None:
        """Waits until nothing runs or waits in the engine; the check's own time limit ends it."""
        while True:
            health = await self.server.health()
            if not health.is_alive:
                raise CheckFailed(f"{what}: the server died: {health.detail}")
            if health.num_running + health.num_waiting == 0:
                return
            await asyncio.sleep(POLL_S)

    async def require_early_end(self, begin: Callable[[], Awaitable[Any]], *, whole_s: float) -> str:
        """Fails unless the engine is idle long before a completion that was left would have been over.

        Args:
            begin: Starts a completion and leaves it.
            whole_s: How long that completion takes if it is not left.
        """
        clock = asyncio.get_running_loop().time
        shares: list[float] = []
        while len(shares) < NUM_TRIALS and min(shares, default=1.0) > MOST_OF_IT:
            await begin()
            started = clock()
            await self.until_idle("after the request was left")
            idle_at = clock()
            await self.server.health()
            asking_s = clock() - idle_at
            shares.append(max(idle_at - started - asking_s, 0.0) / whole_s)
        share = f"{min(shares):.0%} of the time of the whole completion"
        require(min(shares) <= MOST_OF_IT, f"the engine went on for {share}")
        return f"idle after {share}"

    async def until_running(self, task: asyncio.Task[Any]) -> None:
        """Waits until the engine works on something, or the task is done."""
        while not task.done():
            health = await self.server.health()
            if health.num_running:
                return
            await asyncio.sleep(POLL_S)


CheckFunction: TypeAlias = Callable[[Subject], Coroutine[Any, Any, str | None]]


@dataclass(frozen=True, slots=True)
class Check:
    """One sentence of the contract; its function fails with `CheckFailed`, or returns what it measured."""

    name: str
    run: CheckFunction
    ability: Ability | None
    needs_reference: bool
    method: str | None
    """A method that a server may leave out; without it the check is skipped."""


def check(
    name: str,
    *,
    into: list[Check],
    ability: Ability | None = None,
    needs_reference: bool = False,
    method: str | None = None,
) -> Callable[[CheckFunction], CheckFunction]:
    """Adds a function to a list of checks."""

    def add(function: CheckFunction) -> CheckFunction:
        into.append(Check(name, function, ability, needs_reference, method))
        return function

    return add
