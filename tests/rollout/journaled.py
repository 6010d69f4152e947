"""Rollouts with a journal on scripted servers, and the same rollouts after a crash."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.recording.record import RecordKind
from agent_loop.recording.values import unpack
from agent_loop.rollout.journal import FRAME_BYTES, HEADER, StepKey, framed, open_journal, read_records
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from tests.helpers import call_text, encoded
from tests.rollout.harness import WorkerHarness

Rows = Sequence[Mapping[str, Any]]


def run_journaled(
    path: Path, harness: WorkerHarness, rows: Rows, *, resume: bool = False, refuse: bool = False
) -> list[Trajectory]:
    """Run the rows that are not in the journal, in virtual time, and check that nothing leaked."""

    found: list[Trajectory] = []

    async def scenario() -> None:  # (asyncio formats a result, which is slow for trajectories)
        async with open_journal(path, key=key_of(rows), rows=rows, resume=resume, refuse=refuse) as journal:
            outcome = journal.outcome()
            if outcome is not None:
                found.extend(outcome)
                return
            ended, jobs = journal.divide(harness.jobs(rows))
            trajectories = [*ended, *await harness.worker.run(jobs)]
            found.extend(sorted(trajectories, key=lambda t: (t.group, t.rollout, t.branch or 0)))
            await journal.complete(found)
        harness.assert_nothing_is_left()

    run_virtual(scenario())
    return found


def key_of(rows: Rows, **settings: Any) -> StepKey:
    return StepKey.of(rows, step=7, weight_version=6, num_samples=1, settings=settings)


def records_of(data: bytes) -> list[dict[str, Any]]:
    """Return the records of a journal."""
    return [unpack(payload) for payload in read_records(data)[0]]


def ends_of_records(data: bytes) -> Iterator[int]:
    """Return the ends of the header and of each record of a journal."""
    end = len(HEADER)
    yield end
    for payload in read_records(data)[0]:
        end += len(payload) + FRAME_BYTES
        yield end


def cut_after(data: bytes, kind: RecordKind, *, count: int = 1) -> bytes:
    """Return the journal up to the `count`-th record of a kind."""
    ends = list(ends_of_records(data))[1:]
    places = [end for end, record in zip(ends, records_of(data), strict=True) if record["is"] == kind]
    return data[: places[count - 1]]


def journal_of(payloads: Iterable[bytes]) -> bytes:
    """Return the bytes of a journal with these records."""
    return HEADER + b"".join(map(framed, payloads))


class RandomScript:
    """Script that samples another completion for every request. The first `num_calls` turns have `per_turn` calls."""

    def __init__(self, *, seed: int, num_calls: int = 2, per_turn: int = 1) -> None:
        self.num_requests = 0
        self._random = np.random.default_rng(seed)
        self._num_calls = num_calls
        self._per_turn = per_turn

    def __call__(self, request: ScriptedRequest) -> ScriptedReply:
        self.num_requests += 1
        number = int(self._random.integers(1000))
        num_before = _count(request.prompt_ids.tolist(), encoded("<tool_response>")) // self._per_turn
        words = f"I think {number}. "
        if num_before < self._num_calls:
            words += "".join(call_text("add", a=number, b=each) for each in range(self._per_turn))
        ids = encoded(words + "<|im_end|>")
        logprobs = -self._random.random(len(ids))
        return ScriptedReply(ids, logprobs=logprobs.tolist(), latency_s=float(self._random.random()))


def _count(ids: list[int], wanted: list[int]) -> int:
    return sum(ids[start : start + len(wanted)] == wanted for start in range(len(ids)))


def facts(trajectory: Trajectory) -> list[Any]:
    """Return the values that training reads, for comparisons."""
    output = trajectory.output
    return [
        trajectory.trajectory_id,
        trajectory.reward,
        output.stop_reason,
        output.prompt_ids.tolist(),
        output.response_ids.tolist(),
        output.response_mask.tolist(),
        None if output.response_logprobs is None else output.response_logprobs.tolist(),
        output.weight_versions.tolist(),
        [(s.origin, len(s)) for s in output.segments],
        output.messages,
        output.tool_rewards,
        output.turn_scores,
        output.incidents,
        output.num_turns,
    ]
