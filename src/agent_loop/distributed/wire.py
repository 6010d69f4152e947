"""Messages between workers, servers and the driver."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from msgspec import structs

from agent_loop.distributed.contexts import Delta
from agent_loop.errors import AgentLoopError, ServerError
from agent_loop.rollout.jobs import Job
from agent_loop.runtime.describe import describe_error
from agent_loop.servers.base import Ability
from agent_loop.trajectory import AgentLoopOutput, Failure, Trajectory
from agent_loop.trajectory.codec import decode_completion, encode_completion
from agent_loop.types import SamplingParams, StopReason, TokenOutput


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a client needs to know of a server that is up."""

    name: str
    abilities: frozenset[Ability]
    max_concurrent: int | None


# -- between a client and a server: tuples, which are packed several times as fast as data classes ---------------------


class LineLost(Exception):
    """The other end is gone, was started again, or has given this one up: what was asked will not be answered."""


class Ask(NamedTuple):
    """One completion that a client wants."""

    call: int
    """Names it, for a cancellation; unique per client."""
    session: str
    delta: Delta
    param_values: tuple[Any, ...]
    """Of its `SamplingParams`."""

    @classmethod
    def pack(cls, call: int, session: str, delta: Delta, sampling_params: SamplingParams) -> Ask:
        return cls(call, session, delta, _values_of(sampling_params))

    @property
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(*self.param_values)


class PackedCompletion(NamedTuple):
    """A completion, or a part of one."""

    data: bytes

    @classmethod
    def pack(cls, output: TokenOutput) -> PackedCompletion:
        return cls(encode_completion(output))

    def unpack(self) -> TokenOutput:
        return decode_completion(self.data)


class Refusal(NamedTuple):
    """Why there is no completion."""

    packed_error: bytes

    @classmethod
    def pack(cls, error: AgentLoopError) -> Refusal:
        """One that cannot be sent arrives as a `ServerError` that describes it."""
        try:
            packed = pickle.dumps(error, protocol=5)
            pickle.loads(packed)
        except Exception:  # noqa: BLE001  (an engine may raise an error of its own, with anything in it)
            packed = pickle.dumps(ServerError(describe_error(error)), protocol=5)
        return cls(packed)

    @property
    def error(self) -> AgentLoopError:
        return pickle.loads(self.packed_error)


class Resend(NamedTuple):
    """The server does not have the context that the delta adds to."""


Response: TypeAlias = PackedCompletion | Refusal | Resend


class Post(NamedTuple):
    """What a client has to say to a server."""

    line: str
    number: int
    """Posts of a line count from 0, and are taken in their order."""
    asks: Sequence[Ask]
    cancelled: Sequence[int]
    """Calls that nobody waits for any more."""
    ended: Sequence[str]
    """Sessions of which no turn will follow."""
    is_urgent: bool = False
    """Answered as soon as what it says is done."""


class Reply(NamedTuple):
    """What a server has to say to a client."""

    responses: Sequence[tuple[int, Response]]
    """By call."""
    num_others: int
    """Requests of other clients that the server has."""


# -- between a worker and the driver -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class News:
    """What a worker has for the driver."""

    trajectories: bytes
    """Packed; those of one job come together."""
    records: Sequence[tuple[str, bytes]]
    """Trajectory and payload of each record for the journal, in order."""
    is_last: bool
    """The run is over."""


def pack_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """Return trajectories as bytes, without their rows, which the receiver has.

    A trajectory with a value that cannot be sent arrives as failed, with the reason.
    """
    packed = [_without_row(trajectory) for trajectory in trajectories]
    try:
        return pickle.dumps(packed, protocol=5)
    except Exception:  # noqa: BLE001  (only the trajectories with such a value may fail)
        return pickle.dumps([_sendable(trajectory) for trajectory in packed], protocol=5)


def unpack_trajectories(data: bytes, *, jobs: dict[str, Job]) -> list[Trajectory]:
    """Return the trajectories with their rows. Args: jobs: By id; trajectories of other jobs are left out."""
    packed: list[Trajectory] = pickle.loads(data)
    return [structs.replace(each, row=jobs[job_of(each)].row) for each in packed if job_of(each) in jobs]


_values_of = attrgetter(*SamplingParams.__struct_fields__)


def _without_row(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory as the receiver needs it: its output of no subclass, which the receiver may not have."""
    output = AgentLoopOutput(**{f.name: getattr(trajectory.output, f.name) for f in fields(AgentLoopOutput)})
    return structs.replace(trajectory, row={}, output=output, reward_extra=dict(trajectory.reward_extra))


def _sendable(trajectory: Trajectory) -> Trajectory:
    try:
        pickle.dumps(trajectory, protocol=5)
    except Exception as error:  # noqa: BLE001  (a trajectory is data, whatever is in it)
        reason = f"what the loop returned cannot be sent to the trainer's process: {describe_error(error)}"
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
