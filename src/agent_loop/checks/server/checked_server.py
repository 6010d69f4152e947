"""Server under check, with the requests that the checks send to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import numpy as np

from agent_loop.checks.server.reference import Reference
from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.testing.conformance import CheckFailed, CheckFunction, CheckSkipped, CheckSuite, require
from agent_loop.types import IntArray, SamplingParams, TokenOutput, as_token_ids

POLL_S = 0.02
NUM_TRIALS = 3
"""Measurements before a check of a duration fails: other load on the machine may spoil one."""
MAX_SHARE = 0.5
"""Share of a whole completion's time in which the engine must be idle again after a request was aborted."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckedServer:
    """Server under check, and the limits of the requests that it accepts."""

    server: AsyncServerBase
    vocab_size: int
    max_model_len: int
    reference: Reference | None
    tolerance: float
    """Largest accepted difference of log-probs, in nats."""
    long_tokens: int
    """Number of tokens of a completion that is long enough to be interrupted."""
    _sessions: count[int]

    def prompt(self, num_tokens: int, *, seed: int = 0) -> IntArray:
        """Return random tokens, the same for the same arguments."""
        random = np.random.default_rng([seed, num_tokens])
        return random.integers(0, self.vocab_size, num_tokens, dtype=np.int32)

    def session(self) -> str:
        """Return a new request id."""
        return f"check-{next(self._sessions)}"

    async def generate(
        self, prompt_ids: IntArray | Sequence[int], *, session: str | None = None, **params: Any
    ) -> TokenOutput:
        """Return a completion.

        Args:
            session: Request id, whose session stays open. With None, the completion has a session of its own, which is
                ended afterwards.
            params: Fields of `SamplingParams`.
        """
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
        """Return a greedy completion of `num_tokens` tokens that end tokens do not stop."""
        output = await self.generate(
            prompt_ids, session=session, temperature=0.0, max_tokens=num_tokens, ignore_eos=True
        )
        return output.token_ids

    def require_same(self, got: Sequence[int], wanted: Sequence[int], *, prompt: IntArray, what: str) -> None:
        """Fail the check unless two greedy completions are equal, except after a near tie of the reference."""
        if list(got) == list(wanted):
            return
        reason = ""
        if self.reference is not None and len(got) == len(wanted):
            reason = self.reference.disagreement(prompt.tolist(), got)
            if not reason:
                return
        raise CheckFailed(f"{what}: got {list(got)}, not {list(wanted)}; {reason}".rstrip("; "))

    async def until_idle(self, what: str) -> None:
        """Wait until no request is running or queued in the engine."""
        while True:
            health = await self.server.health()
            if not health.is_alive:
                raise CheckFailed(f"{what}: the server died: {health.detail}")
            if health.num_running + health.num_waiting == 0:
                return
            await asyncio.sleep(POLL_S)

    async def require_early_end(self, begin: Callable[[], Awaitable[Any]], *, whole_s: float) -> str:
        """Fail the check unless the engine is idle long before an aborted completion would have ended by itself.

        Args:
            begin: Starts a completion and aborts it.
            whole_s: Seconds that the whole completion takes.
        """
        clock = asyncio.get_running_loop().time
        shares: list[float] = []
        while len(shares) < NUM_TRIALS and min(shares, default=1.0) > MAX_SHARE:
            await begin()
            started = clock()
            await self.until_idle("after the request was aborted")
            idle_at = clock()
            await self.server.health()
            health_s = clock() - idle_at
            shares.append(max(idle_at - started - health_s, 0.0) / whole_s)
        share = f"{min(shares):.0%} of the time of the whole completion"
        require(min(shares) <= MAX_SHARE, f"the engine kept running for {share}")
        return f"idle after {share}"

    async def until_running(self, task: asyncio.Task[Any]) -> None:
        """Wait until the engine runs a request, or the task is done."""
        while not task.done():
            health = await self.server.health()
            if health.num_running:
                return
            await asyncio.sleep(POLL_S)


ServerCheck: TypeAlias = CheckFunction[CheckedServer]


def add_check(
    name: str,
    *,
    suite: CheckSuite[CheckedServer],
    ability: Ability | None = None,
    needs_reference: bool = False,
    method: str | None = None,
) -> Callable[[ServerCheck], ServerCheck]:
    """Return a decorator that adds a function to a suite. The check is skipped if the server lacks what it needs.

    Args:
        name: The rule of the contract, as a sentence.
        ability: Ability that the server must claim.
        needs_reference: Whether the check compares with a reference model.
        method: Optional method of `AsyncServerBase` that the server must define.
    """

    def add(function: ServerCheck) -> ServerCheck:
        @suite.check(name)
        async def check(subject: CheckedServer) -> str | None:
            server = type(subject.server)
            if ability is not None and ability not in subject.server.abilities:
                raise CheckSkipped(f"the server does not claim {ability}")
            if method is not None and getattr(server, method) is getattr(AsyncServerBase, method):
                raise CheckSkipped(f"the server does not define {method}")
            if needs_reference and subject.reference is None:
                raise CheckSkipped("needs a reference")
            return await function(subject)

        return check

    return add
