"""Where sandboxes come from."""

from __future__ import annotations

import json
import socket
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path

import agent_loop
from agent_loop.tools.sandbox.inside.plan import Plan
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
"""All that code finds in its environment, beside `HOME` and `TMPDIR`."""
PACKAGE = Path(agent_loop.__file__).parent
BOOTSTRAP = f"""
import sys, types
for name in ("agent_loop", "agent_loop.tools", "agent_loop.tools.sandbox"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [{str(PACKAGE.parent)!r} + "/" + name.replace(".", "/")]
from agent_loop.tools.sandbox.inside.launcher import main
main()
"""
"""Imports the launcher without what the packages above it import."""


class SandboxSource(ABC):
    """One way to make sandboxes.

    Args:
        settings: Of all sandboxes.
    """

    mechanism: Mechanism

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings

    @property
    def needs_folder(self) -> bool:
        """Whether a sandbox writes to a folder of the host's, having no file system of its own."""
        return self.mechanism in ("landlock", "limits")

    @abstractmethod
    def start(self) -> None:
        """Does what all sandboxes share; again, after `spawn` failed. Blocks.

        Raises:
            SandboxError: It does not work here.
        """

    @abstractmethod
    async def spawn(self, control: socket.socket, *, work: str | None) -> None:
        """Starts a sandbox that is controlled by this end of a socket.

        Args:
            control: The sandbox's end.
            work: The folder on the host that it writes to, where it needs one.

        Raises:
            OSError: It could not be started.
        """

    @abstractmethod
    def is_alive(self) -> bool:
        """Whether what `start` started is there."""

    @abstractmethod
    def close(self) -> None:
        """Ends what `start` started."""


def launch_command(python: str, *, mode: str, plan: Plan) -> list[str]:
    """The command that runs the launcher.

    Args:
        python: The interpreter.
        mode: `zygote`, or `single` for one sandbox in an isolation that is already there.
        plan: What it is told.
    """
    return [python, "-s", "-P", "-c", BOOTSTRAP, mode, json.dumps(asdict(plan))]
