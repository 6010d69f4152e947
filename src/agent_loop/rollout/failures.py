"""The failures of trajectories: their kinds, the limit of their number in a run, and attempts after a failure."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from msgspec import structs

from agent_loop.errors import (
    AgentLoopError,
    BadPrompt,
    EnvironmentBug,
    EnvironmentUnavailable,
    InteractionUnavailable,
    RewardError,
    RewardUnavailable,
    RolloutError,
    SandboxError,
    ServerError,
    WorkspaceError,
    WorkspaceFileMissing,
)
from agent_loop.runtime.describe import describe_error, one_line, short_traceback
from agent_loop.runtime.isolated_task import Abandoned
from agent_loop.trajectory import AgentLoopOutput, Failure, FailureKind, Incident, IncidentKind, Trajectory

logger = logging.getLogger(__name__)

MAX_TRACEBACK = 100_000
"""Characters of a failure's traceback. The middle of a longer traceback is omitted."""
MAX_PROMPT = 80
"""Characters of a prompt in an error message."""
UNAVAILABLE: tuple[tuple[type[AgentLoopError], FailureKind], ...] = (
    (InteractionUnavailable, FailureKind.INTERACTION),
    (EnvironmentUnavailable, FailureKind.ENVIRONMENT),
    (WorkspaceError, FailureKind.WORKSPACE),
    (SandboxError, FailureKind.WORKSPACE),
    (ServerError, FailureKind.SERVER),
    (RewardUnavailable, FailureKind.REWARD),
)
"""Errors that say that infrastructure failed."""
NETWORKED: tuple[tuple[type[AgentLoopError], FailureKind], ...] = (
    (EnvironmentBug, FailureKind.ENVIRONMENT),
    (RewardError, FailureKind.REWARD),
)
"""Errors whose cause may be a connection that failed or a time limit that passed."""
NOT_UNAVAILABLE = (BadPrompt, WorkspaceFileMissing)
"""Errors of the same families that another attempt would repeat."""
LOST_CONNECTIONS = frozenset(
    {
        *("aiohttp.client_exceptions.ClientConnectionError", "aiohttp.client_exceptions.ClientPayloadError"),
        *("anthropic.APIConnectionError", "openai.APIConnectionError"),
        "http.client.IncompleteRead",
        *("httpx.NetworkError", "httpx.RemoteProtocolError", "httpx.TimeoutException"),
        *("requests.exceptions.ChunkedEncodingError", "requests.exceptions.ConnectionError"),
        "requests.exceptions.Timeout",
        "websockets.exceptions.ConnectionClosed",
    }
)
"""Errors by which clients say that a connection failed or a time limit passed. Most of them are neither a
`ConnectionError` nor a `TimeoutError`, and not all of them name one as their cause."""
MAX_CAUSES = 10
FIRST_DELAY_S = 1.0
"""Seconds before the first repetition. Each further one waits twice as long as the one before."""
MAX_DELAY_S = 30.0


class FailureBudget:
    """Counts the failed rollouts of one run. A rollout with several branches counts once."""

    def __init__(self, *, num_trajectories: int, max_share: float) -> None:
        self._num_trajectories = num_trajectories
        self._max_share = max_share
        self._failures: list[Failure] = []
        self._places: dict[str, str] = {}
        """The first trajectory of each error, with its prompt."""
        self._with_branches: set[tuple[int, int]] = set()

    def count(self, trajectory: Trajectory) -> None:
        """Count a trajectory if it failed, and if no other branch of its rollout failed before."""
        if trajectory.output.failure is None:
            return
        if trajectory.branch is not None:
            rollout = (trajectory.group, trajectory.rollout)
            if rollout in self._with_branches:
                return
            self._with_branches.add(rollout)
        self._failures.append(trajectory.output.failure)
        self._places.setdefault(trajectory.output.failure.error, _place_of(trajectory))
        if len(self._failures) > self._max_share * self._num_trajectories:
            raise RolloutError(self._explanation())

    def _explanation(self) -> str:
        [(error, count)] = Counter(failure.error for failure in self._failures).most_common(1)
        example = next(failure for failure in self._failures if failure.error == error)
        logger.info("traceback of the error of %s:\n%s", self._places[error], example.traceback)
        return (
            f"{len(self._failures)} of {self._num_trajectories} trajectories failed ({self._kinds()}), more than "
            f"rollout.max_failed_share {self._max_share} allows; {count} of them with {error}\n"
            f"first in {self._places[error]}:\n" + "\n".join(short_traceback(example.traceback))
        )

    def _kinds(self) -> str:
        counts = Counter(failure.kind for failure in self._failures).most_common()
        return ", ".join(f"{count} {kind}" for kind, count in counts)


def _place_of(trajectory: Trajectory) -> str:
    """Return the name of a trajectory, and the start of its prompt's last message."""
    messages: Any = trajectory.row.get("raw_prompt")
    last: Any = cast(list[Any], messages)[-1] if isinstance(messages, list) and messages else {}
    content: Any = last.get("content")
    text = f", {one_line(content, max_length=MAX_PROMPT)!r}" if isinstance(content, str) else ""
    return f"{trajectory.trajectory_id}{text}"


def failure_of(error: Exception) -> Failure:
    """Return an exception as data. An error of this package that was caused by an exception of user code gets the
    traceback of that exception."""
    root = error.__cause__ if isinstance(error, AgentLoopError) and error.__cause__ else error
    try:
        lines = "".join(traceback.format_exception(root))
    except BaseException:  # noqa: BLE001  (an exception's methods are user code)
        lines = describe_error(root)
    if len(lines) > MAX_TRACEBACK:
        lines = f"{lines[: MAX_TRACEBACK // 2]}\n...\n{lines[-MAX_TRACEBACK // 2 :]}"
    return Failure(error=describe_error(error), traceback=lines, kind=kind_of_failure(error))


def kind_of_failure(error: BaseException) -> FailureKind:
    """Return which part failed.

    An error of an environment or a reward function counts as `CODE`, unless a connection or a time limit caused it.
    """
    causes = _causes(error)
    for cause in causes:
        for known, kind in UNAVAILABLE:
            if isinstance(cause, known) and not isinstance(cause, NOT_UNAVAILABLE):
                return kind
    if any(isinstance(cause, Abandoned) for cause in causes):
        return FailureKind.CODE  # it ignores its cancellation and still runs
    if any(map(_is_lost_connection, causes)):
        for known, kind in NETWORKED:
            if isinstance(error, known):
                return kind
    return FailureKind.CODE


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether a connection failed or a time limit passed. Clients are known by name, and are not imported."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return any(f"{kind.__module__}.{kind.__qualname__}" in LOST_CONNECTIONS for kind in type(error).__mro__)


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and the errors that caused it."""
    causes = [error]
    while len(causes) < MAX_CAUSES:
        last = causes[-1]
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None or cause in causes:
            break
        causes.append(cause)
    return causes


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
