"""What travels between workers, servers and the driver: token arrays as packed bytes, never as lists of ints."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from msgspec import structs

from agent_loop.distributed.contexts import Delta, token_bytes
from agent_loop.errors import AgentLoopError, ServerError
from agent_loop.rollout.worker import Job
from agent_loop.runtime.boundary import describe_error
from agent_loop.servers.base import Ability
from agent_loop.trajectory import AgentLoopOutput, Failure, Segment, Trace, Trajectory
from agent_loop.types import Origin, SamplingParams, ServerStopReason, StopReason, TokenOutput, VersionSpan


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


class Answer(NamedTuple):
    """A completion, or a part of one."""

    token_ids: bytes
    """int32."""
    log_probs: bytes | None
    """float64: what the engine gave, to the bit."""
    stop_reason: ServerStopReason
    weight_version: int
    num_preempted: int
    num_cached_tokens: int | None
    prefill_s: float | None
    version_spans: tuple[tuple[int, int], ...]

    @classmethod
    def pack(cls, output: TokenOutput) -> Answer:
        return cls(
            token_ids=token_bytes(output.token_ids),
            log_probs=None if output.log_probs is None else array("d", output.log_probs).tobytes(),
            stop_reason=output.stop_reason,
            weight_version=output.weight_version,
            num_preempted=output.num_preempted,
            num_cached_tokens=output.num_cached_tokens,
            prefill_s=output.prefill_s,
            version_spans=tuple((span.weight_version, span.num_tokens) for span in output.version_spans),
        )

    def unpack(self) -> TokenOutput:
        return TokenOutput(
            token_ids=np.frombuffer(self.token_ids, np.int32).tolist(),
            log_probs=None if self.log_probs is None else np.frombuffer(self.log_probs, np.float64).tolist(),
            stop_reason=self.stop_reason,
            weight_version=self.weight_version,
            num_preempted=self.num_preempted,
            num_cached_tokens=self.num_cached_tokens,
            prefill_s=self.prefill_s,
            version_spans=tuple(VersionSpan(*span) for span in self.version_spans),
        )


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


Response: TypeAlias = Answer | Refusal | Resend


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
    """Trajectories without their rows, which the receiver has.

    One that holds what cannot be sent arrives as failed, with the reason.
    """
    packed = [_pack(trajectory) for trajectory in trajectories]
    try:
        return pickle.dumps(packed, protocol=5)
    except Exception:  # noqa: BLE001  (one of them is to blame, and only that one is to suffer)
        return pickle.dumps([_sendable(trajectory) for trajectory in trajectories], protocol=5)


def unpack_trajectories(data: bytes, *, jobs: dict[str, Job]) -> list[Trajectory]:
    """Args: jobs: By id; trajectories of others are left out."""
    packed: list[_Packed] = pickle.loads(data)
    return [_unpack(each, jobs[each.job]) for each in packed if each.job in jobs]


@dataclass(frozen=True, slots=True)
class _Packed:
    job: str
    reward: float | None
    reward_extra: dict[str, Any]
    branch: int | None
    token_ids: bytes
    log_probs: bytes
    segments: tuple[tuple[str, int, bool, int | None, tuple[Any, ...]], ...]
    """Origin, tokens, whether they have log-probs, weight version, attachments."""
    stop_reason: str
    fields: dict[str, Any]
    """All others of the output."""
    trace: Trace | None


_values_of = attrgetter(*SamplingParams.__struct_fields__)

_PLAIN_FIELDS = tuple(
    field.name for field in fields(AgentLoopOutput) if field.name not in ("segments", "stop_reason")
)


def _pack(trajectory: Trajectory) -> _Packed:
    output = trajectory.output
    segments = output.segments
    return _Packed(
        job=job_of(trajectory),
        reward=trajectory.reward,
        reward_extra=dict(trajectory.reward_extra),
        branch=trajectory.branch,
        token_ids=b"".join(segment.token_ids.tobytes() for segment in segments),
        log_probs=b"".join(s.log_probs.tobytes() for s in segments if s.log_probs is not None),
        segments=tuple(
            (str(s.origin), len(s), s.log_probs is not None, s.weight_version, s.attachments)
            for s in segments
        ),
        stop_reason=str(output.stop_reason),
        fields={name: getattr(output, name) for name in _PLAIN_FIELDS},
        trace=trajectory.trace,
    )


def _sendable(trajectory: Trajectory) -> _Packed:
    packed = _pack(trajectory)
    try:
        pickle.dumps(packed, protocol=5)
    except Exception as error:  # noqa: BLE001  (a trajectory is data, whatever is in it)
        reason = f"what the loop returned cannot be sent to the trainer's process: {describe_error(error)}"
        bare = AgentLoopOutput(
            segments=[structs.replace(segment, attachments=()) for segment in trajectory.output.segments],
            stop_reason=StopReason.FAILED,
            metrics=trajectory.output.metrics,
            failure=Failure(error=reason, traceback=""),
        )
        return _pack(structs.replace(trajectory, output=bare, reward=None, reward_extra={}))
    return packed


def _unpack(packed: _Packed, job: Job) -> Trajectory:
    token_ids = np.frombuffer(packed.token_ids, np.int32)
    log_probs = np.frombuffer(packed.log_probs, np.float32)
    segments: list[Segment] = []
    start = start_of_log_probs = 0
    for origin, count, has_log_probs, weight_version, attachments in packed.segments:
        run = None
        if has_log_probs:
            run = log_probs[start_of_log_probs : start_of_log_probs + count]
            start_of_log_probs += count
        ids = token_ids[start : start + count]
        segments.append(Segment(ids, Origin(origin), run, weight_version, attachments))
        start += count
    output = AgentLoopOutput(segments=segments, stop_reason=StopReason(packed.stop_reason), **packed.fields)
    return Trajectory(
        output=output,
        row=job.row,
        group=job.group,
        rollout=job.rollout,
        reward=packed.reward,
        reward_extra=packed.reward_extra,
        branch=packed.branch,
        trace=packed.trace,
    )


def job_of(trajectory: Trajectory) -> str:
    """As `Job.place`."""
    return f"group={trajectory.group}/rollout={trajectory.rollout}"
