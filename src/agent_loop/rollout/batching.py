"""Assemble the batch of a run from its trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from agent_loop.config import RolloutConfig
from agent_loop.runtime.threads import run_in_thread
from agent_loop.trajectory import Trajectory

if TYPE_CHECKING:
    from agent_loop.rollout.batch import RolloutBatch

LARGE_BATCH = 100_000
"""Tokens, padded to the limits, from which on a batch is assembled in a thread.

Such a batch takes milliseconds, which would block the event loop. In a thread it takes 1.4 times as long, since another
core has none of the trajectories in its caches."""


async def make_batch(
    trajectories: Sequence[Trajectory], *, config: RolloutConfig, pad_token_id: int
) -> RolloutBatch:
    """Return the batch, padded as `rollout.pad_to` says, with the timing metrics in `batch["timing"]`."""
    # late: needs torch; running loops does not
    from agent_loop.rollout.batch import assemble, timing_metrics
    from agent_loop.rollout.jagged import assemble_jagged

    make = partial(assemble_jagged, trajectories)
    if config.pad_to != "none":
        fixed = config.pad_to == "limits"
        make = partial(
            assemble,
            trajectories,
            pad_token_id=pad_token_id,
            prompt_width=config.prompt_length if fixed else None,
            response_width=config.response_length if fixed else None,
        )
    is_large = len(trajectories) * (config.prompt_length + config.response_length) > LARGE_BATCH
    batch = await run_in_thread(make) if is_large else make()
    batch.set_non_tensor("timing", timing_metrics(trajectories))
    return batch
