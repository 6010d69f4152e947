"""Messages between workers, servers and the driver."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from msgspec import structs

from agent_loop.errors import AgentLoopError, ServerError
from agent_loop.rollout.jobs import Job
from agent_loop.runtime.describe import describe_error
from agent_loop.servers.base import Ability
from agent_loop.trajectory import AgentLoopOutput, Failure, Trajectory
from agent_loop.types import StopReason


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Properties of a started server that its clients use."""

    name: str
    abilities: frozenset[Ability]
    max_concurrent: int | None


class PackedError(NamedTuple):
    """Error that a request failed with."""

    data: bytes

    @classmethod
    def pack(cls, error: AgentLoopError) -> PackedError:
        """Pack an error. An error that cannot be pickled becomes a `ServerError` with its description."""
        try:
            packed = pickle.dumps(error, protocol=5)
            pickle.loads(packed)
        except Exception:  # noqa: BLE001  (errors of an engine may hold values that cannot be pickled)
            packed = pickle.dumps(ServerError(describe_error(error)), protocol=5)
        return cls(packed)

    @property
    def error(self) -> AgentLoopError:
        return pickle.loads(self.data)


@dataclass(frozen=True, slots=True)
class WorkerUpdate:
    """Message from a worker to the driver."""

    trajectories: bytes
    """Packed trajectories that ended. The trajectories of one job are in the same update."""
    records: Sequence[tuple[str, bytes]]
    """Trajectory id and payload of each new journal record, in order."""


def pack_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """Return trajectories as bytes, without their rows, which the receiver has.

    A trajectory with a value that cannot be pickled is replaced by a failed trajectory with the reason.
    """
    packed = [_without_row(trajectory) for trajectory in trajectories]
    try:
        return pickle.dumps(packed, protocol=5)
    except Exception:  # noqa: BLE001  (only the trajectories with such a value may fail)
        return pickle.dumps([_sendable(trajectory) for trajectory in packed], protocol=5)


def unpack_trajectories(data: bytes, *, jobs: dict[str, Job]) -> list[Trajectory]:
    """Return the trajectories with their rows.

    Args:
        jobs: Jobs by id. Trajectories of other jobs are left out.
    """
    packed: list[Trajectory] = pickle.loads(data)
    return [structs.replace(each, row=jobs[job_of(each)].row) for each in packed if job_of(each) in jobs]


def _without_row(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory without its row. Its output becomes a plain `AgentLoopOutput`.

    The receiver may not have the subclass of an output.
    """
    output = AgentLoopOutput(**{f.name: getattr(trajectory.output, f.name) for f in fields(AgentLoopOutput)})
    return structs.replace(trajectory, row={}, output=output, reward_extra=dict(trajectory.reward_extra))


def _sendable(trajectory: Trajectory) -> Trajectory:
    try:
        pickle.dumps(trajectory, protocol=5)
    except Exception as error:  # noqa: BLE001  (user code decides what a trajectory holds)
        reason = (
            f"the loop returned a value that cannot be sent to the trainer's process: {describe_error(error)}"
        )
        bare = AgentLoopOutput(
            segments=[structs.replace(segment, attachments=()) for segment in trajectory.output.segments],
            stop_reason=StopReason.FAILED,
            metrics=trajectory.output.metrics,
            failure=Failure(error=reason, traceback=""),
        )
        return structs.replace(trajectory, output=bare, reward=None, reward_extra={})
    return trajectory


def job_of(trajectory: Trajectory) -> str:
    """Return the `job_id` of a trajectory's job."""
    return f"group={trajectory.group}/rollout={trajectory.rollout}"
