"""Repetition of attempts that a failure of infrastructure ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from msgspec import structs

from agent_loop.rollout.failures import failure_of
from agent_loop.trajectory import AgentLoopOutput, Failure, Incident, IncidentKind

ResultT = TypeVar("ResultT")

FIRST_DELAY_S = 1.0
"""Seconds before the first repetition. Each further one waits twice as long as the one before."""
MAX_DELAY_S = 30.0


def retry_delay_s(number: int) -> float:
    """Return the seconds to wait before a repetition. The first has number 0."""
    return min(FIRST_DELAY_S * 2**number, MAX_DELAY_S)


async def wait_for_retry(number: int, *, cancellation: asyncio.Event | None) -> None:
    """Wait before a repetition. The wait ends early once `cancellation` is set."""
    if cancellation is None:
        await asyncio.sleep(retry_delay_s(number))
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(retry_delay_s(number)):
            await cancellation.wait()


def retryable_failure(outputs: AgentLoopOutput | Sequence[AgentLoopOutput]) -> Failure | None:
    """Return the failure that ended a rollout if another attempt may succeed. Return None if there is none."""
    listed = [outputs] if isinstance(outputs, AgentLoopOutput) else outputs
    failures = [output.failure for output in listed if output.failure is not None]
    return next((failure for failure in failures if failure.is_retried), None)


def noted_first(
    outputs: AgentLoopOutput | list[AgentLoopOutput], incidents: Sequence[Incident]
) -> AgentLoopOutput | list[AgentLoopOutput]:
    """Return the outputs of a rollout with incidents. Of several outputs, the first one gets them."""
    if isinstance(outputs, list):
        return [*(with_incidents(output, incidents) for output in outputs[:1]), *outputs[1:]]
    return with_incidents(outputs, incidents)


def with_incidents(output: AgentLoopOutput, incidents: Sequence[Incident]) -> AgentLoopOutput:
    """Return an output with incidents."""
    for incident in incidents:
        output = output.noted(incident)
    return output


async def repeated_reward(
    call: Callable[[], Awaitable[ResultT]], *, retries: int, on_retry: Callable[[Incident], None]
) -> ResultT:
    """Call a reward function, and call it again at most `retries` times if something that it needs was unavailable.

    Args:
        call: Calls the reward function.
        retries: Maximum number of repetitions.
        on_retry: Called with the incident of each repetition.

    Raises:
        Exception: The error of the last call.
    """
    for number in range(retries):
        try:
            return await call()
        except Exception as error:
            failure = failure_of(error)
            if not failure.is_retried:
                raise
            on_retry(retried(failure, what="the reward function"))
            await asyncio.sleep(retry_delay_s(number))
    return await call()


def retried(failure: Failure, *, what: str = "the trajectory") -> Incident:
    """Return the incident of a repetition."""
    return Incident(IncidentKind.RETRIED, f"{what} ran again after {failure.error}"[:500])


def without_retry(
    outputs: AgentLoopOutput | list[AgentLoopOutput], *, only_once: str
) -> AgentLoopOutput | list[AgentLoopOutput]:
    """Return the outputs of a rollout that does not run again, with the reason in their failures.

    Args:
        outputs: The outputs.
        only_once: Tool or interaction that was used and may be used only once.
    """
    if isinstance(outputs, AgentLoopOutput):
        return _explained(outputs, only_once=only_once)
    return [_explained(output, only_once=only_once) for output in outputs]


def _explained(output: AgentLoopOutput, *, only_once: str) -> AgentLoopOutput:
    failure = output.failure
    if failure is None:
        return output
    error = f"{failure.error}; the trajectory did not run again, since {only_once} was used and may be used only once"
    return output.failed(structs.replace(failure, error=error))
