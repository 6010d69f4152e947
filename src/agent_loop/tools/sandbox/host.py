"""Choice of the mechanism that works on this machine, and start of sandboxes with it."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from agent_loop.errors import ConfigError, SandboxError
from agent_loop.tools.sandbox.inside.spec import SCOPED_SIGNALS_VERSION, SandboxSpec
from agent_loop.tools.sandbox.probe import Isolation, probe_isolation
from agent_loop.tools.sandbox.sandbox import Sandbox, open_sandbox
from agent_loop.tools.sandbox.settings import Mechanism, SandboxSettings

logger = logging.getLogger(__name__)


class SandboxHost:
    """Factory of sandboxes.

    Args:
        settings: Settings of all sandboxes.

    Raises:
        ConfigError: No mechanism isolates sufficiently, and the settings do not allow weaker isolation.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self.isolation = choose_isolation(settings)
        logger.info("sandboxes: %s", self.isolation)

    async def open(self) -> Sandbox:
        """Start a sandbox.

        Raises:
            SandboxError: Two attempts to start the sandbox failed.
        """
        try:
            return await open_sandbox(self._settings, mechanism=self.isolation.mechanism)
        except SandboxError as error:
            logger.warning("%s; retrying once", error)
            return await open_sandbox(self._settings, mechanism=self.isolation.mechanism)


def choose_isolation(settings: SandboxSettings) -> Isolation:
    """Return the isolation of the first mechanism that isolates sufficiently, or works if weaker isolation is allowed.

    Raises:
        ConfigError: No mechanism qualifies.
    """
    refusals: list[str] = []
    for mechanism in settings.mechanisms:
        try:
            isolation = measure_isolation(settings, mechanism=mechanism)
        except SandboxError as error:
            refusals.append(f"{mechanism}: {error}")
            continue
        if isolation.is_sufficient or settings.allow_weaker_isolation:
            return isolation
        refusals.append(str(isolation))
    raise ConfigError(
        "untrusted code cannot be isolated on this machine: it must not reach files, network or processes of the "
        "host, must have no privileges, and must be limited. Tried:\n"
        + "\n".join(f"  {refusal}" for refusal in refusals)
        + "\nUse a kernel with Landlock, or set allow_weaker_isolation: true if you trust the code"
    )


def measure_isolation(settings: SandboxSettings, *, mechanism: Mechanism) -> Isolation:
    """Return the isolation of a mechanism, measured in a sandbox.

    Raises:
        SandboxError: The mechanism does not work on this machine.
    """
    if mechanism == "landlock":
        check_landlock(settings.spec(mechanism))
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may itself run in an event loop
            return thread.submit(lambda: asyncio.run(probe_isolation(settings, mechanism=mechanism))).result()
    except OSError as error:
        raise SandboxError(f"it could not be tested: {error}") from error


def check_landlock(spec: SandboxSpec) -> None:
    """Check that the kernel's Landlock has what a sandbox needs.

    Raises:
        SandboxError: Landlock is missing, or its version cannot contain signals.
    """
    if spec.landlock_version == 0:
        raise SandboxError(
            "the kernel has no Landlock: it is older than Linux 5.13, `lsm=` on its command line does not list "
            "Landlock, or the container forbids it"
        )
    if not spec.signals_are_contained:
        raise SandboxError(
            f"Landlock version {spec.landlock_version} of this kernel does not contain signals; "
            f"use version {SCOPED_SIGNALS_VERSION} (Linux 6.12), or run the agent as root"
        )
