"""Attempts to run one row: what a loop returned, and repetitions after failures of infrastructure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from agent_loop.trajectory import AgentLoopOutput, Failure, Incident, IncidentKind

FIRST_DELAY_S = 1.0
"""Seconds before the first repetition. Each further one waits twice as long as the one before."""
MAX_DELAY_S = 30.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """Outputs of one run of a loop."""

    outputs: tuple[AgentLoopOutput, ...]
    """Never empty."""
    has_branches: bool = False
    """Whether the loop returned a list of outputs."""

    @classmethod
    def of(cls, returned: AgentLoopOutput | Sequence[AgentLoopOutput]) -> Attempt:
        if isinstance(returned, AgentLoopOutput):
            return cls((returned,))
        return cls(tuple(returned), has_branches=True)

    @property
    def retryable_failure(self) -> Failure | None:
        """Failure after which another attempt may succeed. None if there is none."""
        failures = [output.failure for output in self.outputs if output.failure is not None]
        return next((failure for failure in failures if failure.is_retried), None)

    def noted(self, incidents: Sequence[Incident]) -> Attempt:
        """Return the attempt with incidents. Of several outputs, the first one gets them."""
        first, *others = self.outputs
        return replace(self, outputs=(with_incidents(first, incidents), *others))

    def explained(self, *, only_once: str) -> Attempt:
        """Return an attempt that is not repeated since `only_once` was used, with this reason in its failures."""
        why = f"the trajectory did not run again, since {only_once} was used and may be used only once"
        return replace(
            self,
            outputs=tuple(
                output
                if output.failure is None
                else output.failed(structs.replace(output.failure, error=f"{output.failure.error}; {why}"))
                for output in self.outputs
            ),
        )


def with_incidents(output: AgentLoopOutput, incidents: Sequence[Incident]) -> AgentLoopOutput:
    for incident in incidents:
        output = output.noted(incident)
    return output


def retry_delay_s(number: int) -> float:
    """Return the seconds to wait before a repetition. The first has number 0."""
    return min(FIRST_DELAY_S * 2**number, MAX_DELAY_S)


def retried(failure: Failure, *, what: str = "the trajectory") -> Incident:
    """Return the incident of a repetition."""
    return Incident(IncidentKind.RETRIED, f"{what} ran again after {failure.error}"[:500])
