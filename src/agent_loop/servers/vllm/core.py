"""Running `AsyncLLM`, with control calls that fail if its processes die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

from agent_loop.errors import ServerDied, ServerTimeout
from agent_loop.runtime.concurrency import run_shielded, run_together
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.vllm.launch import SchedulerState
from agent_loop.servers.vllm.logs import EngineLog

CALL_TIMEOUT_S = 600.0
"""Seconds for one control call: a step of a weight update, `sleep` or `wake_up`."""
STOP_TIMEOUT_S = 20.0
POLL_S = 0.5
"""Seconds between two checks whether the engine is alive, during a control call."""


class EngineCore:
    """Engine and its log. `llm` is the `AsyncLLM`."""

    def __init__(self, llm: Any, *, server: str, log: EngineLog, scheduler: SchedulerState | None) -> None:
        self.llm: Any = llm
        self._server = server
        self._log = log
        self._scheduler = scheduler

    @property
    def is_dead(self) -> bool:
        return self.llm is None or bool(self.llm.errored)

    def num_running(self, unfinished: int) -> int:
        """Return how many of `unfinished` requests were in the batch of the last step."""
        return unfinished if self._scheduler is None else min(unfinished, self._scheduler.num_running)

    @property
    def kv_cache_share(self) -> float | None:
        """Share of the KV cache that running requests held after the last step; None if it is not known."""
        return None if self._scheduler is None else self._scheduler.kv_cache_share

    def died(self, request_id: str = "") -> ServerDied:
        """Return the error of a call to the dead engine."""
        codes = [process.exitcode for process in engine_processes(self.llm)]
        how = ", ".join(f"exit code {code}" for code in codes if code is not None) or "its processes are gone"
        return ServerDied(
            f"vLLM's engine died ({how}); see {self._log.path} for why, and start another server",
            server=self._server,
            request_id=request_id,
        )

    async def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Await a control call of the engine.

        Raises:
            ServerDied: The engine died during the call. vLLM itself would wait without limit.
            ServerTimeout: The call took longer than `CALL_TIMEOUT_S`.
        """
        over = asyncio.Event()

        async def run() -> Any:
            try:
                return await coroutine
            finally:
                over.set()

        async def watch() -> None:
            clock = asyncio.get_running_loop().time
            started = clock()
            while not over.is_set():
                if self.is_dead:
                    raise self.died()
                if clock() - started > CALL_TIMEOUT_S:
                    raise ServerTimeout(
                        f"vLLM did not answer {coroutine.__name__} within {CALL_TIMEOUT_S:g} s; start another server",
                        server=self._server,
                    )
                await asyncio.wait({waiting}, timeout=POLL_S)

        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(over.wait())
            try:
                answer, _ = await run_together([run(), watch()])
            finally:
                waiting.cancel()
        return answer

    async def call_workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call a method of the worker extension in every worker."""
        return cast(list[dict[str, Any]], await self.call(self.llm.collective_rpc(method, args=args)))

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        """Pause the engine while the body runs. Requests in flight keep their tokens, and all caches are emptied."""
        await self.call(self.llm.pause_generation(mode="keep", clear_cache=True))
        try:
            yield
        finally:
            if not self.is_dead:
                await run_shielded(lambda: self.call(self.llm.resume_generation()), timeout_s=CALL_TIMEOUT_S)

    async def stop(self) -> None:
        """Stop the engine and the tasks that it started on this event loop."""
        resources = getattr(self.llm.engine_core, "resources", None)
        tasks = [self.llm.output_handler, getattr(resources, "output_queue_task", None)]
        running = [cast("asyncio.Task[Any]", task) for task in tasks if task is not None and not task.done()]
        await run_in_thread(self.llm.shutdown, timeout=STOP_TIMEOUT_S)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=STOP_TIMEOUT_S)
        # vLLM's finalizer calls shutdown once more, which fails at the interpreter's exit.
        self.llm.shutdown = _nothing
        self.llm = None


def _nothing(timeout: float | None = None) -> None:
    pass


def engine_processes(llm: Any) -> list[Any]:
    """Return the `multiprocessing` processes in which the engine runs."""
    resources = getattr(llm.engine_core, "resources", None)
    manager = getattr(resources, "engine_manager", None)
    return list(getattr(manager, "processes", ()))
