"""Trajectories and completions arrive unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from agent_loop.distributed.messages import pack_trajectories, unpack_trajectories
from agent_loop.rollout.jobs import Job
from agent_loop.trajectory import AgentLoopOutput, Incident, IncidentKind, Segment, Trajectory
from agent_loop.trajectory.codec import decode_completion, encode_completion
from agent_loop.types import Origin, StopReason, TokenChunk, TokenOutput

ROW = {"raw_prompt": [], "huge": "x" * 10_000}
JOB = Job(ROW, 3, 1, {"temperature": 1.0})
JOBS = {JOB.trajectory_id: JOB}


def trajectory(**fields: Any) -> Trajectory:
    segments = [
        Segment(np.asarray([1, 2], np.int32), Origin.PROMPT),
        Segment(np.asarray([3], np.int32), Origin.MODEL, np.asarray([-0.1], np.float32), 7),
        Segment(np.asarray([4, 5], np.int32), Origin.TOOL),
        Segment(np.asarray([6], np.int32), Origin.MODEL, None, 8),
    ]
    output = AgentLoopOutput(
        segments=segments,
        stop_reason=StopReason.RESPONSE_LENGTH,
        messages=[{"role": "user", "content": "?"}],
        incidents=[Incident(IncidentKind.CUT_TURN, "length", 1)],
        reward_score=0.5,
        **fields,
    )
    return Trajectory(output, ROW, 3, 1, reward=0.5, reward_extra={"a": 1}, branch=2)


def test_a_trajectory_arrives_unchanged_and_is_sent_without_its_row() -> None:
    sent = trajectory(extra_fields={"note": "n"})
    packed = pack_trajectories([sent])
    assert len(packed) < 3000
    [found] = unpack_trajectories(packed, jobs=JOBS)
    assert found.row is ROW
    assert (found.trajectory_id, found.reward, found.reward_extra) == (sent.trajectory_id, 0.5, {"a": 1})
    for a, b in zip(found.output.segments, sent.output.segments, strict=True):
        assert (a.token_ids.tolist(), a.origin, a.weight_version) == (
            b.token_ids.tolist(),
            b.origin,
            b.weight_version,
        )
        assert (a.logprobs is None) == (b.logprobs is None)
        assert a.logprobs is None or a.logprobs.tobytes() == b.logprobs.tobytes()  # type: ignore[union-attr]
    for name in ("stop_reason", "messages", "incidents", "reward_score", "extra_fields", "num_turns"):
        assert getattr(found.output, name) == getattr(sent.output, name)


def test_a_trajectory_that_cannot_be_sent_arrives_as_failed_and_the_others_unchanged() -> None:
    bad = trajectory(extra_fields={"f": lambda: None})
    other = Job(ROW, 4, 0, {})
    good = Trajectory(trajectory().output, ROW, 4, 0, reward=1.0, reward_extra={})
    first, second = unpack_trajectories(
        pack_trajectories([bad, good]), jobs={**JOBS, other.trajectory_id: other}
    )
    assert first.output.failure is not None
    assert "cannot be sent" in first.output.failure.error
    assert first.reward is None
    assert first.output.response_ids.tolist() == [3, 4, 5, 6]
    assert (second.output.failure, second.reward) == (None, 1.0)


def test_a_trajectory_of_another_batch_is_ignored() -> None:
    assert unpack_trajectories(pack_trajectories([trajectory()]), jobs={}) == []


def test_a_completion_arrives_bit_for_bit_in_few_bytes() -> None:
    logprobs = np.random.default_rng(0).normal(size=1000).tolist()
    top = np.arange(2000, dtype=np.float32).reshape(1000, 2)
    chunk = TokenChunk(list(range(1000)), logprobs, 5, "length", 1, 3, extras={"top": top})
    output = TokenOutput.from_chunks([replace(chunk.part(0, 400), weight_version=4), chunk.part(400, 1000)])
    packed = encode_completion(output)
    assert len(packed) < 1000 * 20 + 1000
    assert decode_completion(packed) == output
