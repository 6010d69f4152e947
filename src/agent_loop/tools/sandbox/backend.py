"""Base class of the backends that start sandboxes."""

from __future__ import annotations

import json
import socket
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path

import agent_loop
from agent_loop.tools.sandbox.inside.spec import SandboxSpec
from agent_loop.tools.sandbox.settings import Mechanism, SandboxSettings

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MPLBACKEND": "Agg",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""The complete environment of the code, in addition to `HOME` and `TMPDIR`."""
PACKAGE = Path(agent_loop.__file__).parent
BOOTSTRAP = f"""
import sys, types
for name in ("agent_loop", "agent_loop.tools", "agent_loop.tools.sandbox"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [{str(PACKAGE.parent)!r} + "/" + name.replace(".", "/")]
from agent_loop.tools.sandbox.inside.launcher import main
main()
"""
"""Program that imports the launcher without importing the packages above it."""


class SandboxBackend(ABC):
    """Base class of the backends that start sandboxes.

    Args:
        settings: Settings of all sandboxes.
    """

    mechanism: Mechanism

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings

    @property
    def needs_folder(self) -> bool:
        """Whether a sandbox writes to a folder of the host, because it has no file system of its own."""
        return self.mechanism in ("landlock", "limits")

    @abstractmethod
    def start(self) -> None:
        """Start what all sandboxes share. Called again after `spawn` failed. This call blocks.

        Raises:
            SandboxError: The backend does not work on this machine.
        """

    @abstractmethod
    async def spawn(self, control: socket.socket, *, work: str | None) -> None:
        """Start a sandbox that is controlled through a socket.

        Args:
            control: The sandbox's end of the socket.
            work: The folder on the host that the sandbox writes to, if it needs one.

        Raises:
            OSError: The sandbox could not be started.
        """

    @abstractmethod
    def is_alive(self) -> bool:
        """Return whether the processes that `start` started are running."""

    @abstractmethod
    def close(self) -> None:
        """Terminate the processes that `start` started."""


def launch_command(python: str, *, mode: str, spec: SandboxSpec) -> list[str]:
    """Return the command that runs the launcher.

    Args:
        python: The interpreter.
        mode: `zygote`, or `single` for one sandbox whose isolation is already set up.
        spec: The spec that the launcher receives.
    """
    return [python, "-s", "-P", "-c", BOOTSTRAP, mode, json.dumps(asdict(spec))]
