"""A rollout worker for TRL's `AsyncGRPOTrainer`: groups of trajectories ahead of the training."""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from itertools import count
from typing import Any, cast

from torch import Tensor

from agent_loop.errors import RolloutError
from agent_loop.integrations.trl.completions import rollout_samples
from agent_loop.integrations.trl.loop_thread import LoopThread
from agent_loop.integrations.trl.weights import AgentLoopWeightTransfer
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import RowSampler
from agent_loop.runtime.concurrency import run_until
from agent_loop.trajectory import Trajectory

MOST_LOST_IN_A_ROW = 8
"""Groups of which too many trajectories failed; one more, and the worker gives up."""
logger = logging.getLogger(__name__)


class AgentLoopRolloutWorker:
    """Implements TRL's `RolloutWorkerProtocol`. `AgentLoopRollouts.worker` makes it.

    Consumes rows, one group of `args.num_generations` trajectories each; produces scored samples. What is in flight and
    what waits in `rollout_buffer` is at most `args.max_inflight_tasks` samples, or one group. Single use, as TRL's.
    """

    def __init__(
        self, manager: AgentLoopManager, *, thread: LoopThread, sampler: RowSampler, args: Any
    ) -> None:
        """Args:
        manager: Runs the trajectories, in the thread's loop.
        sampler: Gives one row per step: that of a group.
        args: The trainer's, which completes them when it is made.
        """
        self.rollout_buffer: queue.Queue[Any] = SampleBuffer(on_take=self._note_taken)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.weight_transfer = AgentLoopWeightTransfer(self._publish)
        """To give the trainer beside the worker."""
        self.model_version = 0
        self._manager = manager
        self._thread = thread
        self._sampler = sampler
        self._args = args
        self._num_groups_in_flight = 0
        self._num_lost_in_a_row = 0
        self._moved = asyncio.Event()
        self._stopping = asyncio.Event()
        self._running: Future[None] | None = None
        self._last_sign = time.monotonic()

    def start(self) -> None:
        """Begins to produce samples."""
        self._last_sign = time.monotonic()
        self._running = self._thread.start(run_until(self._produce(), self._stopping))

    def stop(self) -> None:
        """Cancels what is in flight, and waits for that."""
        if self._running is not None:
            self._thread.call_soon(self._stopping.set)
            wait([self._running])

    def update_model_version(self, model_version: int) -> None:
        """Takes note of the version that the trainer counts."""
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Says why no samples come.

        Raises:
            RolloutError: The worker broke, which `__cause__` explains, or no trajectory has ended for that long.
        """
        if self._running is not None and self._running.done():
            error = None if self._running.cancelled() else _root(self._running.exception())
            raise RolloutError(f"the rollout worker has ended: {error or 'it was stopped'}") from error
        silence_s = time.monotonic() - self._last_sign
        if silence_s > stale_after_s:
            raise RolloutError(
                f"no trajectory has ended for {silence_s:.0f} s, more than heartbeat_stale_after_s={stale_after_s:g}; "
                "raise it, or lower rollout.trajectory_timeout_s"
            )

    async def _produce(self) -> None:
        async with self._manager.awake(), asyncio.TaskGroup() as groups:
            for group_id in count():
                while not self._has_room():
                    self._moved.clear()
                    await self._moved.wait()
                self._num_groups_in_flight += 1
                groups.create_task(self._run_group(group_id))

    def _has_room(self) -> bool:
        size: int = self._args.num_generations
        taken = self._num_groups_in_flight * size + self.rollout_buffer.qsize()
        bound = min(self._args.max_inflight_tasks, self._args.queue_maxsize)
        return taken == 0 or taken + size <= bound

    async def _run_group(self, group_id: int) -> None:
        try:
            trajectories = await self._manager.run(
                self._sampler.batch(group_id + 1),
                n=self._args.num_generations,
                label=f"group={group_id}",
                on_trajectory=self._note_ended,
            )
            samples = rollout_samples(
                trajectories, group_id=group_id, max_tokens=self._args.max_completion_length
            )
        except RolloutError as error:
            self._note_lost(error)
        else:
            self._num_lost_in_a_row = 0
            for sample in samples:
                self.rollout_buffer.put_nowait(sample)
        finally:
            self._num_groups_in_flight -= 1
            self._moved.set()

    def _note_lost(self, error: RolloutError) -> None:
        """A group that failed is left out; many in a row are a broken run."""
        self._num_lost_in_a_row += 1
        if self._num_lost_in_a_row > MOST_LOST_IN_A_ROW:
            raise error
        logger.warning("a group is left out: %s", error)
        self.metrics_queue.put_nowait({"agent_loop/lost_groups_total": 1.0})

    def _note_ended(self, _: Trajectory) -> None:
        self._last_sign = time.monotonic()

    def _note_taken(self) -> None:
        """Called in the trainer's thread."""
        self._last_sign = time.monotonic()
        self._thread.call_soon(self._moved.set)

    def _publish(self, weights: list[tuple[str, Tensor]]) -> None:
        """TRL counts the version after it has sent the weights."""
        self._thread.run(self._manager.update_weights(weights, weight_version=self.model_version + 1))


class SampleBuffer(queue.Queue[Any]):
    """A queue that tells when something is taken out of it."""

    def __init__(self, *, on_take: Callable[[], None]) -> None:
        super().__init__()
        self._on_take = on_take

    def _get(self) -> Any:
        item = super()._get()
        self._on_take()
        return item


def _root(error: BaseException | None) -> BaseException | None:
    """What task groups have wrapped."""
    while isinstance(error, BaseExceptionGroup):
        error = cast(BaseExceptionGroup[BaseException], error).exceptions[0]
    return error
