"""Batches that benchmarks of updates make by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, as_token_ids

Row = tuple[list[int], list[tuple[list[int], bool]]]
"""Prompt, and runs of tokens with whether the model sampled them."""


def to_batch(rows: Sequence[Row]) -> RolloutBatch:
    """Return rows as a batch."""
    trajectories: list[Trajectory] = []
    for number, (prompt, runs) in enumerate(rows):
        segments = [Segment(as_token_ids(prompt), Origin.PROMPT)]
        for ids, is_sampled in runs:
            logprobs = np.full(len(ids), -7.6, np.float32)
            sampled = Segment(as_token_ids(ids), Origin.MODEL, logprobs, 0)
            segments.append(sampled if is_sampled else Segment(as_token_ids(ids), Origin.TOOL))
        trajectories.append(Trajectory(AgentLoopOutput(segments=segments), {}, number, 0, 0.0, {}))
    return assemble(trajectories, pad_token_id=0)
