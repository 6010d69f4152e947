"""Settings of sandboxes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from pydantic import Field

from agent_loop.config import NotNegative, Positive, PositiveSeconds, Section
from agent_loop.errors import ConfigError
from agent_loop.tools.sandbox.inside import landlock
from agent_loop.tools.sandbox.inside.spec import SCOPED_SIGNALS_VERSION, SandboxSpec

SYSTEM_PYTHON = "/usr/bin/python3"


class SandboxSettings(Section):
    """Limits on untrusted code, and what it may see."""

    time_limit_s: PositiveSeconds = 20.0
    """Seconds for one call."""
    interrupt_grace_s: PositiveSeconds = 1.0
    """Seconds between the interrupt at the time limit and the kill."""
    memory_mb: Annotated[int, Field(ge=64, le=2**24)] = 1024
    """Limit on the address space of one process, and on the resident memory of all processes of a sandbox together."""
    cpu_seconds: Positive = 300
    """Limit on the CPU time of one process, over all calls of a trajectory."""
    max_processes: Annotated[int, Field(ge=2, le=100_000)] = 32
    """Maximum number of processes and threads of one sandbox."""
    max_open_files: Annotated[int, Field(ge=16, le=2**20)] = 256
    max_file_mb: Positive = 64
    temp_dir_mb: Positive = 128
    """Total size of all files that a sandbox writes."""
    output_limit_bytes: Annotated[int, Field(ge=1000, le=2_000_000)] = 16_384
    """Limit on the output of one call. Of a longer output, the first and the last half of this size are kept."""
    seed: NotNegative | None = 0
    """Seed of `random`, so that replayed calls give the same results; None for a different seed each time."""
    python: str = ""
    """Interpreter, Python 3.11 or newer. Code may import the packages installed in its environment. Empty is the
    agent's own, or `/usr/bin/python3` if the agent is root and other users cannot reach its own."""
    visible: tuple[str, ...] = ()
    """Absolute paths of files and folders that are visible read-only, in addition to the system's and Python's. If the
    agent runs as root, they must be readable by everybody."""
    preload: tuple[str, ...] = ()
    """Modules that are imported when a sandbox starts, outside of the time limits of its calls."""
    allow_weaker_isolation: bool = False
    """Whether code runs even if the kernel has no Landlock, so that it can reach network, files and processes of the
    host. Only for trusted code."""

    def resolve_python(self) -> str:
        """Return the interpreter. Sandboxes of root run as other users, who must be able to reach it."""
        if self.python or os.geteuid() != 0 or (_is_open(sys.prefix) and _is_open(sys.base_prefix)):
            return self.python or sys.executable
        return SYSTEM_PYTHON

    def resolve_visible(self) -> list[str]:
        """Return the paths in `visible`, and the targets of links among them."""
        shown: set[str] = set()
        for path in self.visible:
            real = str(Path(path).resolve())
            if not Path(path).is_absolute() or not Path(path).exists():
                raise ConfigError(f"visible contains {path!r}; give absolute paths that exist")
            if real in ("/", "/proc", "/sys", "/dev", "/etc", str(Path.home())):
                raise ConfigError(
                    f"visible contains {path!r}, which would expose secrets; give the files in it that are needed"
                )
            shown |= {path.rstrip("/"), real}
        return sorted(shown)

    def spec(self) -> SandboxSpec:
        """Return the spec that the sandbox's processes receive."""
        version, has_own_user = landlock.version(), os.geteuid() == 0
        is_contained = version >= SCOPED_SIGNALS_VERSION or (version > 0 and has_own_user)
        if not is_contained and not self.allow_weaker_isolation:
            lack = (
                f"version {version} of its Landlock does not contain signals"
                if version
                else "it has no Landlock"
            )
            raise ConfigError(
                f"this kernel cannot isolate untrusted code: {lack}. Use Linux 6.12, or run the agent as root on Linux "
                "5.13, with `landlock` in the kernel's `lsm=`; or set allow_weaker_isolation: true if you trust the "
                "code"
            )
        limits = self.model_dump(exclude={"python", "visible", "preload", "allow_weaker_isolation"})
        return SandboxSpec(
            landlock_version=version,
            has_own_user=has_own_user,
            visible=self.resolve_visible(),
            preload=list(self.preload),
            **limits,
        )


def _is_open(path: str) -> bool:
    """Return whether every user may pass through a folder and all its parents."""
    real = Path(path).resolve()
    return all(folder.stat().st_mode & 0o001 for folder in (real, *real.parents))
