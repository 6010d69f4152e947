"""Repetition of attempts that a failure of infrastructure ended."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from agent_loop.trajectory import AgentLoopOutput, Failure, Incident, IncidentKind

FIRST_DELAY_S = 1.0
"""Seconds before the first repetition. Each further one waits twice as long as the one before."""
MAX_DELAY_S = 30.0


def retry_delay_s(number: int) -> float:
    """Return the seconds to wait before a repetition. The first has number 0."""
    return min(FIRST_DELAY_S * 2**number, MAX_DELAY_S)


def retryable_failure(outputs: AgentLoopOutput | Sequence[AgentLoopOutput]) -> Failure | None:
    """Return the failure that ended a rollout if another attempt may succeed. Return None if there is none."""
    listed = [outputs] if isinstance(outputs, AgentLoopOutput) else outputs
    failures = [output.failure for output in listed if output.failure is not None]
    return next((failure for failure in failures if failure.is_retried), None)


def with_incidents(
    outputs: AgentLoopOutput | list[AgentLoopOutput], incidents: Sequence[Incident]
) -> AgentLoopOutput | list[AgentLoopOutput]:
    """Return the outputs of a rollout with incidents. Of several outputs, the first one gets them."""
    if not incidents or not outputs:
        return outputs
    if isinstance(outputs, AgentLoopOutput):
        for incident in incidents:
            outputs = outputs.noted(incident)
        return outputs
    first = outputs[0]
    for incident in incidents:
        first = first.noted(incident)
    return [first, *outputs[1:]]


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
