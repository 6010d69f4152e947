"""Choice of the backend that works on this machine, and start of sandboxes with it."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from agent_loop.errors import ConfigError, SandboxError
from agent_loop.runtime.threads import run_in_thread
from agent_loop.tools.sandbox.backend import SandboxBackend
from agent_loop.tools.sandbox.bubblewrap import Bubblewrap
from agent_loop.tools.sandbox.fork_server import ForkServer
from agent_loop.tools.sandbox.isolation import Isolation
from agent_loop.tools.sandbox.probe import probe_isolation
from agent_loop.tools.sandbox.sandbox import Sandbox, open_sandbox
from agent_loop.tools.sandbox.settings import MECHANISMS, Mechanism, SandboxSettings

ResultT = TypeVar("ResultT")
Probe = Callable[[SandboxBackend], Awaitable[Isolation]]
logger = logging.getLogger(__name__)


class SandboxHost:
    """Factory of sandboxes. Its backend is closed by `close`, or with the last reference to the host.

    Args:
        settings: Settings of all sandboxes.
        backends: The backends to try, best first; None for those that the settings name.
        probe: Function that measures the isolation of a backend.

    Raises:
        ConfigError: No backend isolates sufficiently, and the settings do not allow weaker isolation.
    """

    def __init__(
        self,
        settings: SandboxSettings,
        *,
        backends: Sequence[SandboxBackend] | None = None,
        probe: Probe = probe_isolation,
    ) -> None:
        backends = create_backends(settings) if backends is None else backends
        self._backend, self.isolation = choose_backend(backends, settings=settings, probe=probe)
        self._restarting = threading.Lock()
        self._finalizer = weakref.finalize(self, self._backend.close)
        logger.info("sandboxes: %s", self.isolation)

    async def open(self) -> Sandbox:
        """Start a sandbox.

        Raises:
            SandboxError: Two attempts to start the sandbox failed.
        """
        try:
            return await open_sandbox(self._backend)
        except SandboxError as error:
            logger.warning("%s; retrying once", error)
            await run_in_thread(self._restart_if_gone)
            return await open_sandbox(self._backend)

    def close(self) -> None:
        """Close the backend. No more sandboxes can be opened."""
        self._finalizer()

    def _restart_if_gone(self) -> None:
        with self._restarting:
            if not self._backend.is_alive():
                self._backend.start()


def create_backends(settings: SandboxSettings) -> list[SandboxBackend]:
    """Return the backends that the settings name, best first."""
    if settings.mechanism != "auto":
        return [create_backend(settings, mechanism=settings.mechanism)]
    return [
        create_backend(settings, mechanism=mechanism)
        for mechanism in MECHANISMS
        if mechanism != "limits" or settings.allow_weaker_isolation
    ]


def create_backend(settings: SandboxSettings, *, mechanism: Mechanism) -> SandboxBackend:
    """Return the backend of a mechanism."""
    if mechanism == "bubblewrap":
        return Bubblewrap(settings)
    return ForkServer(settings, mechanism=mechanism)


def start_and_probe(backend: SandboxBackend, *, probe: Probe = probe_isolation) -> Isolation:
    """Start a backend and measure its isolation. Close the backend afterwards.

    Raises:
        SandboxError: The backend does not work on this machine.
    """
    try:
        backend.start()
        return _run_apart(lambda: probe(backend))
    except OSError as error:
        raise SandboxError(f"it could not be tested: {error}") from error


def choose_backend(
    backends: Sequence[SandboxBackend], *, settings: SandboxSettings, probe: Probe
) -> tuple[SandboxBackend, Isolation]:
    """Start and return the first backend that isolates sufficiently, or that works if weaker isolation is allowed.

    Raises:
        ConfigError: No backend qualifies.
    """
    refusals: list[str] = []
    for backend in backends:
        try:
            isolation = start_and_probe(backend, probe=probe)
        except SandboxError as error:
            refusals.append(f"{backend.mechanism}: {error}")
            backend.close()
            continue
        except BaseException:
            backend.close()
            raise
        if isolation.is_sufficient or settings.allow_weaker_isolation:
            return backend, isolation
        refusals.append(str(isolation))
        backend.close()
    raise ConfigError(
        "untrusted code cannot be isolated on this machine: it must not reach files, network or processes of the "
        "host, must have no privileges, and must be limited. Tried:\n"
        + "\n".join(f"  {refusal}" for refusal in refusals)
        + "\nAllow user namespaces, install bubblewrap, or set allow_weaker_isolation: true if you trust the code"
    )


def _run_apart(function: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Run a coroutine in a new thread, since the caller may itself run in an event loop."""
    outcome: list[ResultT | BaseException] = []

    async def run() -> ResultT:
        return await function()

    def work() -> None:
        try:
            outcome.append(asyncio.run(run()))
        except BaseException as error:  # noqa: BLE001  (raised in the calling thread)
            outcome.append(error)

    thread = threading.Thread(target=work, name="agent-loop-sandbox-probe")
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
