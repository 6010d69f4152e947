"""Start of an in-process `AsyncLLM` in a thread, with a time limit."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from agent_loop.errors import ConfigError, ServerDied, ServerTimeout
from agent_loop.planning.devices import seeing
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.isolated_task import DeadlineExpired
from agent_loop.runtime.threads import run_in_thread
from agent_loop.runtime.user_code import run_bounded
from agent_loop.servers.base import refuse_unknown_options
from agent_loop.servers.packages import import_engine
from agent_loop.servers.vllm.logs import EngineLog
from agent_loop.servers.vllm.options import PACKAGE, SUPPORTED

ABANDON_TIMEOUT_S = 20.0
POLL_S = 0.2
ENGINE_CORE = "EngineCore"
"""Start of the names of vLLM's processes."""
_starting = threading.Lock()
"""Held while the environment of this process is that of an engine which starts."""


class SchedulerState:
    """Counts of the scheduler after its last step. A stat logger, which vLLM creates and calls."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.num_running = 0
        self.kv_cache_share = 0.0

    def record(self, scheduler_stats: Any = None, *args: Any, **kwargs: Any) -> None:
        """Store the counts of a step. Called by vLLM."""
        if scheduler_stats is not None:
            self.num_running = int(scheduler_stats.num_running_reqs)
            self.kv_cache_share = float(scheduler_stats.kv_cache_usage)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _ignore


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Stub of the other methods that vLLM calls on stat loggers."""


class EngineLauncher:
    """Starts one engine once, and kills the engine's processes if the start takes too long.

    vLLM does not report its processes while it starts. They are the processes that did not exist before.
    """

    def __init__(
        self,
        server: str,
        *,
        options: Mapping[str, Any],
        log: EngineLog,
        devices: Sequence[str] | None = None,
    ) -> None:
        self._server = server
        self._devices = devices
        self._options = dict(options)
        self._log = log
        self._is_abandoned = False
        self._is_over = threading.Event()
        self._before = {process.pid for process in multiprocessing.active_children()}
        self.scheduler: SchedulerState | None = None

    async def launch(self, *, timeout_s: float) -> Any:
        """Start the engine and return its `AsyncLLM`.

        Raises:
            ConfigError: vLLM refuses an option.
            ServerTimeout: The engine did not start in time.
            ServerDied: The engine failed.
        """
        try:
            return await run_bounded(lambda: run_in_thread(self._build), timeout_s=timeout_s)
        except DeadlineExpired:
            await run_in_thread(self._abandon)
            raise ServerTimeout(
                f"vLLM did not start within {timeout_s:g} s; raise rollout.start_timeout_s, or see its log"
                + self._log.tail(),
                server=self._server,
            ) from None
        except asyncio.CancelledError:
            await run_shielded(lambda: run_in_thread(self._abandon), timeout_s=2 * ABANDON_TIMEOUT_S)
            raise
        except ConfigError:
            raise
        except Exception as error:
            raise self._died(error) from error

    def _build(self) -> Any:
        try:
            with self._showing_devices():
                engine = self._make()
            if self._is_abandoned:
                engine.shutdown()
            return engine
        finally:
            self._is_over.set()

    def _make(self) -> Any:
        arguments = import_engine("vllm.engine.arg_utils", package=PACKAGE, supported=SUPPORTED)
        async_llm = import_engine("vllm.v1.engine.async_llm", package=PACKAGE, supported=SUPPORTED)
        config = import_engine("vllm.config.logging", package=PACKAGE, supported=SUPPORTED)
        usage = import_engine("vllm.usage.usage_lib", package=PACKAGE, supported=SUPPORTED)
        args_class: Any = arguments.AsyncEngineArgs
        refuse_unknown_options(self._options, known=[field.name for field in dataclasses.fields(args_class)])
        # The trainer's process has threads and may have a GPU context, which do not survive a fork.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        logging_config = config.LoggingConfig(pylogging_config_file=str(self._log.config_path))
        try:
            args = args_class(**self._options, logging_config=logging_config)
            vllm_config = args.create_engine_config(usage.UsageContext.ENGINE_CONTEXT)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"vLLM refuses model.path or rollout.engine_kwargs: {error}") from error
        return async_llm.AsyncLLM.from_vllm_config(
            vllm_config,
            usage_context=usage.UsageContext.ENGINE_CONTEXT,
            stat_loggers=[self._make_scheduler_state],
            disable_log_stats=True,
        )

    @contextmanager
    def _showing_devices(self) -> Generator[None]:
        """Show the engine's processes their devices alone.

        vLLM starts its processes with the environment of this one, which has other devices. It is changed until the
        first process has started, and by one engine at a time.
        """
        if self._devices is None:
            yield
            return
        is_built = threading.Event()

        def restore() -> None:
            while not is_built.wait(POLL_S) and not _engine_processes() - before:
                pass
            shown.close()

        shown = ExitStack()
        shown.enter_context(_starting)
        shown.enter_context(seeing(self._devices))
        before = _engine_processes()
        watcher = threading.Thread(target=restore, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_built.set()
            watcher.join()

    def _make_scheduler_state(self, vllm_config: Any, engine_index: int = 0) -> SchedulerState:
        self.scheduler = SchedulerState(vllm_config, engine_index)
        return self.scheduler

    def _abandon(self) -> None:
        """Kill the engine's processes as they appear, until vLLM gives up."""
        self._is_abandoned = True
        deadline = time.monotonic() + ABANDON_TIMEOUT_S
        while not self._is_over.wait(POLL_S) and time.monotonic() < deadline:
            for process in multiprocessing.active_children():
                if process.pid not in self._before and process.name.startswith(ENGINE_CORE):
                    process.kill()
                    process.join(POLL_S)

    def _died(self, error: Exception) -> ServerDied:
        return ServerDied(
            f"vLLM failed to start ({type(error).__name__}: {error}){self._log.tail()}",
            server=self._server,
        )


def _engine_processes() -> set[int | None]:
    return {
        process.pid for process in multiprocessing.active_children() if process.name.startswith(ENGINE_CORE)
    }
