"""Worker that produces samples for TRL's asynchronous trainer, the transfer of weights, and the event loop of both."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from itertools import count
from typing import Any, TypeVar, cast

from torch import Tensor

from agent_loop.errors import ConfigError, RolloutError
from agent_loop.integrations.trl.completions import rollout_samples
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import RowSampler
from agent_loop.runtime.concurrency import run_while
from agent_loop.training.adapters import merged_parameters
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row

MAX_LOST_GROUPS_IN_A_ROW = 8
"""Number of consecutive lost groups that the worker tolerates. One more ends the worker."""
logger = logging.getLogger(__name__)


class AgentLoopRolloutWorker:
    """Implementation of TRL's `RolloutWorkerProtocol`, created by `AgentLoopRollouts.worker`.

    Consumes rows, with a group of `args.num_generations` trajectories per row, and produces scored samples. The samples
    in flight and in `rollout_buffer` are at most `args.max_inflight_tasks`, or one group. Single use, like TRL's
    worker.
    """

    def __init__(
        self, manager: AgentLoopManager, *, thread: LoopThread, sampler: RowSampler[Row], args: Any
    ) -> None:
        """Create the worker; `start` starts it."""
        self.rollout_buffer: queue.Queue[Any] = SampleBuffer(on_take=self._on_sample_taken)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.weight_transfer = AgentLoopWeightTransfer(self._publish)
        """Weight transfer to pass to the trainer together with the worker."""
        self.model_version = 0
        self._manager = manager
        self._thread = thread
        self._sampler = sampler
        self._args = args
        self._num_groups_in_flight = 0
        self._num_lost_in_a_row = 0
        self._room_changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._producing: Future[None] | None = None
        self._last_activity = time.monotonic()

    def start(self) -> None:
        """Start to produce samples."""
        self._last_activity = time.monotonic()
        self._producing = self._thread.start(run_while(self._produce(), condition=self._stopping.wait()))

    def stop(self) -> None:
        """Cancel trajectories in flight, and wait until they have ended."""
        if self._producing is not None:
            self._thread.call_soon(self._stopping.set)
            wait([self._producing])

    def update_model_version(self, model_version: int) -> None:
        """Set the weight version that the trainer counts."""
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise an error that explains why there are no samples, if the worker is broken or stalled."""
        if self._producing is not None and self._producing.done():
            error = None if self._producing.cancelled() else _root_cause(self._producing.exception())
            raise RolloutError(f"the rollout worker has ended: {error or 'it was stopped'}") from error
        silence_s = time.monotonic() - self._last_activity
        if silence_s > stale_after_s:
            raise RolloutError(
                f"no trajectory has ended for {silence_s:.0f} s, more than heartbeat_stale_after_s={stale_after_s:g}; "
                "raise it, or lower rollout.trajectory_timeout_s"
            )

    async def _produce(self) -> None:
        async with self._manager.awake(), asyncio.TaskGroup() as groups:
            for group_id in count():
                while not self._has_capacity():
                    self._room_changed.clear()
                    await self._room_changed.wait()
                self._num_groups_in_flight += 1
                groups.create_task(self._run_group(group_id))

    def _has_capacity(self) -> bool:
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
                on_trajectory=self._record_activity,
            )
            samples = rollout_samples(
                trajectories, group_id=group_id, max_tokens=self._args.max_completion_length
            )
        except RolloutError as error:
            self._count_lost_group(error)
        else:
            self._num_lost_in_a_row = 0
            for sample in samples:
                self.rollout_buffer.put_nowait(sample)
        finally:
            self._num_groups_in_flight -= 1
            self._room_changed.set()

    def _count_lost_group(self, error: RolloutError) -> None:
        """Skip a failed group. Raise its error if too many groups in a row have failed."""
        self._num_lost_in_a_row += 1
        if self._num_lost_in_a_row > MAX_LOST_GROUPS_IN_A_ROW:
            raise error
        logger.warning("a group is skipped: %s", error)
        self.metrics_queue.put_nowait({"agent_loop/lost_groups_total": 1.0})

    def _record_activity(self, _: Trajectory) -> None:
        self._last_activity = time.monotonic()

    def _on_sample_taken(self) -> None:
        """Wake the producer. Called in the trainer's thread."""
        self._last_activity = time.monotonic()
        self._thread.call_soon(self._room_changed.set)

    def _publish(self, weights: list[tuple[str, Tensor]]) -> None:
        """Publish weights as the next version, because TRL counts the version after it has sent the weights."""
        self._thread.run(self._manager.update_weights(weights, weight_version=self.model_version + 1))


class SampleBuffer(queue.Queue[Any]):
    """Queue that calls a function whenever an item is taken out of it."""

    def __init__(self, *, on_take: Callable[[], None]) -> None:
        super().__init__()
        self._on_take = on_take

    def _get(self) -> Any:
        item = super()._get()
        self._on_take()
        return item


def _root_cause(error: BaseException | None) -> BaseException | None:
    """Return the first exception inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = cast(BaseExceptionGroup[BaseException], error).exceptions[0]
    return error


Publish = Callable[[list[tuple[str, Tensor]]], None]


def policy_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Return all weights of a model that TRL trains, with LoRA adapters merged and under the names of the servers."""
    for name, adapter in getattr(model, "peft_config", {}).items():
        extras = [key for key in ("use_dora", "modules_to_save") if getattr(adapter, key, None)]
        if str(adapter.peft_type).rpartition(".")[2] != "LORA" or extras:
            raise ConfigError(
                f"the adapter {name!r} is {type(adapter).__name__} with {', '.join(extras) or 'no extras'}, which "
                "cannot be merged for the servers; use a LoraConfig without use_dora and modules_to_save"
            )
    return merged_parameters(model.get_base_model() if hasattr(model, "get_base_model") else model)


class AgentLoopWeightTransfer:
    """Implementation of TRL's `WeightTransferProtocol` that publishes weights to the servers.

    Servers load new weights between two engine steps while requests are in flight. So `init_weight_transfer`, `pause`,
    `resume` and `destroy` do nothing.
    """

    def __init__(self, publish: Publish) -> None:
        self._publish = publish

    def init_weight_transfer(self) -> None:
        """Do nothing: no setup is needed."""

    def pause(self) -> None:
        """Do nothing: servers load weights while requests are in flight."""

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Publish the weights as the next version."""
        self._publish(list(iterator))

    def resume(self) -> None:
        """Do nothing: `pause` does not pause."""

    def destroy(self) -> None:
        """Do nothing: no resources are held."""


ResultT = TypeVar("ResultT")
CANCEL_TIMEOUT_S = 60.0
"""Seconds that an interrupted coroutine has to clean up."""
POLL_INTERVAL_S = 0.5
"""Longest wait in one go. A signal that arrives just before a wait is handled only after the wait."""


class LoopThread:
    """Event loop that runs coroutines for other threads until it is closed. Single use."""

    def __init__(self, name: str) -> None:
        self._loop_made: Future[asyncio.AbstractEventLoop] = Future()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run_until_closed()), name=name, daemon=True
        )
        self._thread.start()
        self._loop = self._loop_made.result()

    def run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine and return its result. Ctrl-C cancels the coroutine and is raised once it has ended."""
        future: Future[ResultT] = Future()
        tasks: list[asyncio.Task[ResultT]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(call))
            tasks[0].add_done_callback(partial(_copy_result, to=future))

        def end() -> None:
            for task in tasks:
                task.cancel()
            if not tasks:
                call.close()
                future.set_exception(CancelledError())

        try:
            self._loop.call_soon_threadsafe(begin)
            while not future.done():
                wait([future], timeout=POLL_INTERVAL_S)
        except BaseException:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(end)  # runs after `begin`
                wait([future], timeout=CANCEL_TIMEOUT_S)
            raise
        return future.result()

    def start(self, call: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Start a coroutine and return a future of its result."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Schedule a call of a function in the event loop. Do nothing if the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancel running coroutines, and wait for the thread to end."""
        self.call_soon(self._closing.set)
        self._thread.join()

    async def _run_until_closed(self) -> None:
        self._loop_made.set_result(asyncio.get_running_loop())
        await self._closing.wait()


def _copy_result(task: asyncio.Task[ResultT], *, to: Future[ResultT]) -> None:
    if task.cancelled():
        to.set_exception(CancelledError())
    elif (error := task.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(task.result())
