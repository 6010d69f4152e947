"""Base class of loops that run a program which calls the model over HTTP."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from agent_loop.gateway.errors import ProgramFailed
from agent_loop.gateway.listener import Endpoint, reachable
from agent_loop.gateway.session import MAX_BRANCHES, Session
from agent_loop.gateway.wishes import wishes_of
from agent_loop.loops.base import AgentLoopBase, LoopContext
from agent_loop.rewards.function import REWARD_NAMES, Score, read_score
from agent_loop.rollout.failures import failure_of
from agent_loop.runtime.concurrency import run_while
from agent_loop.runtime.user_code import run_bounded
from agent_loop.trajectory import AgentLoopOutput, Failure
from agent_loop.types import Row, StopReason

NO_COMPLETION = (
    "the program ended without a completion from the model; make it use the base URL that it is given"
)


class Program(Protocol):
    """A program that is ready to run."""

    def run(self, endpoint: Endpoint) -> Any:
        """Run the program, or return an awaitable that does.

        Returns:
            None, a reward, or a mapping that may hold a reward. Other values of the mapping become extra fields.

        Raises:
            ProgramFailed: The program reported a failure.
        """
        ...

    async def score(self) -> Score | None:
        """Return the reward of what the program left behind. Called after the program has ended.

        None leaves the reward to what the program returned, and then to the reward function.
        """
        ...


class ProgramLoop(AgentLoopBase):
    """Base class of loops that run a program which calls the model over HTTP.

    The conversations of the program are recorded to the token, with one output per branch. If the program fails, the
    trajectory fails with the program's traceback. If the program fails right after a limit refused a further turn, the
    trajectory ends with the limit's stop reason instead.
    """

    def __init__(
        self, context: LoopContext, *, max_branches: int = MAX_BRANCHES, accept_as_wish: Sequence[str] = ()
    ) -> None:
        """Create the loop.

        Args:
            context: Context of the loop.
            max_branches: Maximum number of conversations per program.
            accept_as_wish: Names of request parameters that the program may send although they cannot be honoured. Each
                such parameter is dropped and leaves an incident.
        """
        super().__init__(context)
        self._wishes = wishes_of(accept_as_wish)
        self._max_branches = max_branches
        self._session: Session | None = None

    @abstractmethod
    def prepared(self, row: Row) -> AbstractAsyncContextManager[Program]:
        """Prepare what the program of a row needs, and remove all of it at the end."""

    async def run(
        self, sampling_params: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        session = Session(
            self.context,
            sampling_params=sampling_params,
            max_branches=self._max_branches,
            wishes=self._wishes,
        )
        async with self.prepared(row) as program:
            async with session:
                self._session = session
                result = await _run_program(program.run, session, cancellation=self.context.cancellation)
                await session.close(result.reason)
            if _is_scored(session, result):
                result = result.scored(await program.score())
        if session.fault is not None:
            raise session.fault
        return _output(session, result)

    def unfinished_output(
        self, reason: StopReason, *, failure: Failure | None = None
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        outputs = [] if self._session is None else self._session.outputs(failure=failure)
        return _one_or_more(outputs, otherwise=_ProgramResult(reason=reason, failure=failure))


@dataclass(frozen=True, slots=True)
class _ProgramResult:
    """Result of a program."""

    reward: float | None = None
    extra_fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    failure: Failure | None = None
    reason: StopReason = StopReason.ANSWERED

    @classmethod
    def from_value(cls, returned: Any) -> _ProgramResult:
        """Build the result from the program's return value: None, a number, or a mapping that may hold a reward.

        Raises:
            RewardError: The value has another type.
        """
        if returned is None:
            return cls()
        if isinstance(returned, Mapping) and not any(name in returned for name in REWARD_NAMES):
            return cls(extra_fields=dict(cast(Mapping[str, Any], returned)))
        score = read_score(returned, source="the program")
        return cls(score.reward, score.extra)

    def scored(self, score: Score | None) -> _ProgramResult:
        """Return the result with a score."""
        if score is None:
            return self
        return replace(self, reward=score.reward, extra_fields={**self.extra_fields, **score.extra})


async def _run_program(
    run: Callable[[Endpoint], Any], session: Session, *, cancellation: asyncio.Event | None
) -> _ProgramResult:
    """Run a program while its session is served.

    Once the deadline has passed, the stop reason is `DEADLINE`, even if the program ignored its cancellation.
    """
    result: _ProgramResult | None = None
    cancelled = cancellation or asyncio.Event()
    try:
        async with reachable(session) as endpoint, session.deadline:
            result = await run_while(_call_program(lambda: run(endpoint)), condition=_wait_for(cancelled))
    except TimeoutError:
        if not session.deadline.expired():
            raise
    if session.deadline.expired():
        return _ProgramResult(reason=StopReason.DEADLINE)
    return result or _ProgramResult(reason=StopReason.CANCELLED)


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


async def _call_program(call: Callable[[], Any]) -> _ProgramResult:
    """Call the program and return its result. An exception becomes the result's failure."""
    try:
        return _ProgramResult.from_value(await run_bounded(call, timeout_s=None))
    except ProgramFailed as failed:
        return _ProgramResult(failure=failed.failure)
    except Exception as error:  # noqa: BLE001  (a failed program is data, with its traceback)
        return _ProgramResult(failure=failure_of(error))


def _is_scored(session: Session, result: _ProgramResult) -> bool:
    """Return whether a result gets a reward: the program was not cancelled, and did not fail by itself."""
    return result.reason is not StopReason.CANCELLED and (result.failure is None or session.was_refused)


def _output(session: Session, result: _ProgramResult) -> AgentLoopOutput | list[AgentLoopOutput]:
    failure = None if session.was_refused else result.failure
    outputs = session.outputs(reward=result.reward, extra_fields=result.extra_fields, failure=failure)
    if not outputs and result.reason is StopReason.ANSWERED and failure is None:
        failure = Failure(error=f"EpisodeError: {NO_COMPLETION}", traceback=NO_COMPLETION)
        result = _ProgramResult(failure=failure)
    return _one_or_more(outputs, otherwise=result)


def _one_or_more(
    outputs: list[AgentLoopOutput], *, otherwise: _ProgramResult
) -> AgentLoopOutput | list[AgentLoopOutput]:
    if not outputs:
        reason = StopReason.FAILED if otherwise.failure else otherwise.reason
        return AgentLoopOutput(segments=(), stop_reason=reason, failure=otherwise.failure)
    return outputs[0] if len(outputs) == 1 else outputs
