"""Engines in processes of their own: their packages, their start, their last log lines, their death and their end.

    python -m agent_loop.servers.process MODULE ARGUMENTS...

runs `main` of a module as the first process of an engine, until its parent ends.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

from packaging.specifiers import SpecifierSet

from agent_loop.errors import ConfigError, ServerDied, ServerTimeout
from agent_loop.planning.devices import environment_for
from agent_loop.runtime.concurrency import run_shielded, run_while

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

FIRST_ERROR = re.compile(r"(?<!\S)[\w.]*(Error|Exception): .*")
"""Last line of a traceback."""
NUM_LOG_LINES = 30
"""Lines of the engine's log that errors quote."""
KILL_TIMEOUT_S = 10.0
"""Seconds for killed processes to disappear."""
DEATH_TIMEOUT_S = 5.0
"""Seconds to wait for the end of a process that does not respond."""
PARENT_POLL_S = 1.0
CHILD_POLL_S = 0.5


class EngineProcess:
    """Processes of one engine. The first one leads a process group.

    The whole group is killed when its first process ends, when `close` is called, and when this process ends.
    """

    def __init__(self, server: str) -> None:
        """Create the handle of a process that is not started."""
        self.ended = asyncio.Event()
        """Set once the first process has ended and its log is complete."""
        self._server = server
        self._log: deque[str] = deque(maxlen=NUM_LOG_LINES)
        self._first_error = ""
        """The first error in the log, which caused the later ones, and is often far above the last lines."""
        self._process: subprocess.Popen[bytes] | None = None
        self._kill: Callable[[], object] = _nothing

    @cached_property
    def folder(self) -> Path:
        """Temporary folder of the engine, which `close` removes."""
        return Path(tempfile.mkdtemp(prefix="agent-loop-engine-"))

    @property
    def pid(self) -> int | None:
        """Id of the first process and of its group; None before the start."""
        return None if self._process is None else self._process.pid

    def start(
        self,
        module: str,
        *arguments: str,
        devices: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start the first process, which calls `main(*arguments)` of a module."""
        loop = asyncio.get_running_loop()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, module, *arguments],
            env={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                **environment_for(devices),
                **(environment or {}),
            },
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # Kills only once, because the process id may be reused. Runs at the interpreter's exit at the latest.
        self._kill = weakref.finalize(self, _kill_group, self._process.pid)
        threading.Thread(target=self._watch, args=(self._process, loop), daemon=True).start()

    async def ready(self, wait: Callable[[], Coroutine[Any, Any, ResultT]], *, timeout_s: float) -> ResultT:
        """Return the result of `wait`, which is cancelled if the process ends. Kill the process if that fails."""
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                result = await run_while(wait(), condition=self.ended.wait())
        except BaseException as error:
            await run_shielded(self.close, timeout_s=2 * KILL_TIMEOUT_S)
            if isinstance(error, TimeoutError) and limit.expired():
                raise ServerTimeout(
                    f"the engine did not start within {timeout_s:g} s; raise rollout.start_timeout_s, or see "
                    f"{self._last_lines()}",
                    server=self._server,
                ) from None
            raise
        if self.ended.is_set():
            if self._process is not None and self._process.returncode == os.EX_CONFIG:
                raise ConfigError(self._log[-1])
            raise ServerDied(self.end, server=self._server)
        return result  # pyright: ignore[reportReturnType]  (None only if the process ended)

    @property
    def end(self) -> str:
        """How the first process ended, and the last log lines."""
        code = None if self._process is None else self._process.returncode
        return f"the engine's process ended with exit code {code}; start another server, and see {self._last_lines()}"

    async def has_ended(self) -> bool:
        """Return whether the first process has ended, or ends in a few seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DEATH_TIMEOUT_S):
                await self.ended.wait()
        return self.ended.is_set()

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Terminate the first process, kill the group after `grace_s`, wait for its end, and remove the folder.

        Can be called again.
        """
        if self._process is not None:
            await self._end(self._process, grace_s=grace_s)
        if "folder" in self.__dict__:
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _end(self, process: subprocess.Popen[bytes], *, grace_s: float) -> None:
        if grace_s and not self.ended.is_set():
            process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.ended.wait()
        self._kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self.ended.wait()

    def _last_lines(self) -> str:
        cause = f"the first error in its log ({self._first_error}), and " if self._first_error else ""
        return f"{cause}its last log lines:\n" + ("\n".join(self._log) or "(it wrote nothing)")

    def _watch(self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        """Follow the log until no process writes to it any more."""
        assert process.stdout is not None
        follower = threading.Thread(target=self._follow, args=(process.stdout,), daemon=True)
        follower.start()
        process.wait()
        self._kill()
        follower.join(KILL_TIMEOUT_S)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while _is_running(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        with suppress(RuntimeError):  # the event loop was closed before
            loop.call_soon_threadsafe(self.ended.set)

    def _follow(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip()
                self._log.append(text)
                if not self._first_error and (found := FIRST_ERROR.search(text)):
                    self._first_error = found.group()
                logger.info("%s: %s", self._server, text)


def import_engine(module: str, *, package: str, supported: str) -> Any:
    """Import a module of an engine's package."""
    found = require_version(package, supported=supported)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{package} {found} is installed but cannot be imported: {error}") from error


def require_version(package: str, *, supported: str) -> str:
    """Return the installed version of a package without importing it."""
    found = installed_version(package)
    if found is None:
        raise ConfigError(
            f'agent_loop.servers.{package} needs {package}: pip install "{package}{supported}" (docs/engines.md)'
        )
    if not SpecifierSet(supported, prereleases=True).contains(found):
        raise ConfigError(
            f"{package} {found} is installed, but only {supported} is supported; install a supported version"
        )
    return found


def installed_version(package: str) -> str | None:
    """Return the version of the distribution that provides a top-level package, or None."""
    for distribution in packages_distributions().get(package, ()):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def refuse_option(why: object) -> NoReturn:
    """End the first process of an engine, so that its server raises `ConfigError`. Called in that process."""
    print(f"the engine refuses model.path or rollout.engine_kwargs: {why}".replace("\n", " "), flush=True)
    os._exit(os.EX_CONFIG)


def end_with_children() -> None:
    """End this process with the first of the engine's other processes. Called in the first process of an engine.

    SGLang may not notice the end of one, and vLLM's HTTP server outlives its engine by seconds.
    """
    threading.Thread(target=_watch_children, daemon=True).start()


def _watch_children() -> None:
    seen: set[Any] = set()
    while True:
        seen.update(multiprocessing.active_children())
        for child in seen:
            if child.exitcode is not None:
                print(f"process {child.pid} ended, and the engine with it", flush=True)
                os._exit(1)
        time.sleep(CHILD_POLL_S)


def _nothing() -> None:
    """Stub of `_kill` while there is no process."""


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _is_running(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _watch_parent(pid: int) -> None:
    """Kill the whole process group when the parent process ends, also while the engine starts."""
    while os.getppid() == pid:
        time.sleep(PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


def main(module: str, *arguments: str) -> None:
    """Run `main(*arguments)` of a module. Ctrl-C is for the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    importlib.import_module(module).main(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
