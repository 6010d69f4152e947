"""The settings of sandboxes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field

from agent_loop.config import NotNegative, Positive, PositiveSeconds, Section
from agent_loop.errors import ConfigError
from agent_loop.tools.sandbox.inside import landlock
from agent_loop.tools.sandbox.inside.plan import Plan

MEGABYTE = 2**20
Mechanism: TypeAlias = Literal["namespaces", "bubblewrap", "landlock", "limits"]
MECHANISMS: tuple[Mechanism, ...] = get_args(Mechanism)
"""Best first."""


class SandboxSettings(Section):
    """What code may use, and how it is shut in."""

    time_limit_s: PositiveSeconds = 20.0
    """One call."""
    interrupt_grace_s: PositiveSeconds = 1.0
    """Code over its time limit is interrupted; if it runs on for so long, it is killed."""
    memory_mb: Annotated[int, Field(ge=64, le=2**24)] = 1024
    """Address space of one process, and resident memory of a sandbox's processes together."""
    cpu_seconds: Positive = 300
    """CPU time of one process, over all calls of a trajectory."""
    max_processes: Annotated[int, Field(ge=2, le=100_000)] = 32
    """Processes and threads of one sandbox."""
    max_open_files: Annotated[int, Field(ge=16, le=2**20)] = 256
    max_file_mb: Positive = 64
    temp_dir_mb: Positive = 128
    """All files that a sandbox writes."""
    output_limit_bytes: Annotated[int, Field(ge=1000, le=2_000_000)] = 16_384
    """Output of one call; of more, the first and the last half are kept."""
    seed: NotNegative | None = 0
    """What `random` begins from, so that calls run again give the same; None for something else each time."""
    python: str = sys.executable
    """The interpreter, of Python 3.11 or newer; code may import what is installed in its environment."""
    visible: tuple[str, ...] = ()
    """Files and folders shown read-only at their own places, beside the system's and Python's. Where the agent runs as
    root they must be readable by everybody."""
    preload: tuple[str, ...] = ()
    """Modules imported once and shared by all sandboxes, such as `numpy`: a later import costs nothing."""
    mechanism: Mechanism | Literal["auto"] = "auto"
    """`auto` takes the first that shuts enough in: namespaces, bubblewrap, Landlock."""
    allow_weaker_isolation: bool = False
    """Run code also where network, files or processes of the host are within its reach. Only for code you trust."""
    bubblewrap: str = "bwrap"
    """The command."""

    def shown(self) -> list[str]:
        """What is shown; with a link, what it leads to.

        Raises:
            ConfigError: Something does not exist, or is too much.
        """
        shown: set[str] = set()
        for path in self.visible:
            real = str(Path(path).resolve())
            if not Path(path).is_absolute() or not Path(path).exists():
                raise ConfigError(f"visible names {path!r}; give absolute paths of what exists")
            if real in ("/", "/proc", "/sys", "/dev", "/etc", str(Path.home())):
                raise ConfigError(
                    f"visible names {path!r}, which would show secrets; name what is needed in it"
                )
            shown |= {path.rstrip("/"), real}
        return sorted(shown)

    def plan(self, mechanism: Mechanism) -> Plan:
        """What the sandbox's processes are told."""
        inside = "namespaces" if mechanism == "bubblewrap" else mechanism
        return Plan(
            mechanism=inside,
            landlock_version=landlock.version() if mechanism == "landlock" else 0,
            visible=self.shown(),
            preload=list(self.preload),
            seed=self.seed,
            time_limit_s=self.time_limit_s,
            interrupt_grace_s=self.interrupt_grace_s,
            memory_bytes=self.memory_mb * MEGABYTE,
            cpu_seconds=self.cpu_seconds,
            max_processes=self.max_processes,
            has_own_user=inside == "namespaces" or os.geteuid() == 0,
            max_open_files=self.max_open_files,
            max_file_bytes=self.max_file_mb * MEGABYTE,
            temp_dir_bytes=self.temp_dir_mb * MEGABYTE,
            output_bytes=self.output_limit_bytes,
        )
