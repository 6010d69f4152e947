"""The sandboxes of one tool: the way of isolation that works here, and what it shuts in."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from agent_loop.errors import ConfigError, SandboxError
from agent_loop.runtime.threads import run_in_thread
from agent_loop.tools.sandbox.bubblewrap import Bubblewrap
from agent_loop.tools.sandbox.fork_server import ForkServer
from agent_loop.tools.sandbox.isolation import Isolation
from agent_loop.tools.sandbox.probe import probe_isolation
from agent_loop.tools.sandbox.sandbox import Sandbox, open_sandbox
from agent_loop.tools.sandbox.settings import MECHANISMS, Mechanism, SandboxSettings
from agent_loop.tools.sandbox.source import SandboxSource

ResultT = TypeVar("ResultT")
Probe = Callable[[SandboxSource], Awaitable[Isolation]]
logger = logging.getLogger(__name__)


class SandboxHost:
    """Opens sandboxes. Ends with its last reference, or at `close`.

    Args:
        settings: Of all sandboxes.
        sources: The ways to try, best first; None for those that the settings name.
        probe: Finds out what a way shuts in.

    Raises:
        ConfigError: No way shuts enough in, and the settings do not allow less.
    """

    def __init__(
        self,
        settings: SandboxSettings,
        *,
        sources: Sequence[SandboxSource] | None = None,
        probe: Probe = probe_isolation,
    ) -> None:
        sources = make_sources(settings) if sources is None else sources
        self._source, self.isolation = choose_source(sources, settings=settings, probe=probe)
        self._restarting = threading.Lock()
        self._finalizer = weakref.finalize(self, self._source.close)
        logger.info("sandboxes: %s", self.isolation)

    async def open(self) -> Sandbox:
        """Starts a sandbox.

        Raises:
            SandboxError: It could not be started, in two attempts.
        """
        try:
            return await open_sandbox(self._source)
        except SandboxError as error:
            logger.warning("%s; trying once more", error)
            await run_in_thread(self._restart_if_gone)
            return await open_sandbox(self._source)

    def close(self) -> None:
        """Ends what sandboxes come from; no more can be opened."""
        self._finalizer()

    def _restart_if_gone(self) -> None:
        with self._restarting:
            if not self._source.is_alive():
                self._source.start()


def make_sources(settings: SandboxSettings) -> list[SandboxSource]:
    """The ways that the settings name, best first."""
    if settings.mechanism != "auto":
        return [make_source(settings, mechanism=settings.mechanism)]
    return [
        make_source(settings, mechanism=mechanism)
        for mechanism in MECHANISMS
        if mechanism != "limits" or settings.allow_weaker_isolation
    ]


def make_source(settings: SandboxSettings, *, mechanism: Mechanism) -> SandboxSource:
    """One way."""
    if mechanism == "bubblewrap":
        return Bubblewrap(settings)
    return ForkServer(settings, mechanism=mechanism)


def try_source(source: SandboxSource, *, probe: Probe = probe_isolation) -> Isolation:
    """Starts it and finds out what it shuts in. Close it afterwards.

    Raises:
        SandboxError: It does not work here.
    """
    try:
        source.start()
        return _run_apart(lambda: probe(source))
    except OSError as error:
        raise SandboxError(f"it could not be tried: {error}") from error


def choose_source(
    sources: Sequence[SandboxSource], *, settings: SandboxSettings, probe: Probe
) -> tuple[SandboxSource, Isolation]:
    """The first way that shuts enough in, started; where less is allowed, the first that works.

    Raises:
        ConfigError: There is none.
    """
    refusals: list[str] = []
    for source in sources:
        try:
            isolation = try_source(source, probe=probe)
        except SandboxError as error:
            refusals.append(f"{source.mechanism}: {error}")
            source.close()
            continue
        except BaseException:
            source.close()
            raise
        if isolation.has_minimum or settings.allow_weaker_isolation:
            return source, isolation
        refusals.append(str(isolation))
        source.close()
    raise ConfigError(
        "code of models cannot be shut in here: files, network and processes of the host must be out of its reach, "
        "without privileges and with limits. Tried:\n"
        + "\n".join(f"  {refusal}" for refusal in refusals)
        + "\nAllow user namespaces, install bubblewrap, or set allow_weaker_isolation: true if you trust the code"
    )


def _run_apart(function: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Runs a coroutine to its end from code that may itself be called in an event loop."""
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
