"""The devices of this machine, and the environment variables that show a process some of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

VISIBLE = "CUDA_VISIBLE_DEVICES"
ALL_DEVICES = "AGENT_LOOP_DEVICES"
"""Variable with the devices that a run may use, such as `0,1,2,3`. Unset means those of `CUDA_VISIBLE_DEVICES`, or else
all of the machine. A training sets it before it hides devices from itself."""
QUERY_TIMEOUT_S = 20.0


def visible_devices() -> list[str]:
    """Return the names of the devices that a run may use, as `CUDA_VISIBLE_DEVICES` lists them; empty without any."""
    given = os.environ.get(ALL_DEVICES, os.environ.get(VISIBLE))
    if given is None:
        return [str(index) for index in range(len(device_memory_MiB()))]
    return [name.strip() for name in given.split(",") if name.strip()]


@cache
def device_memory_MiB() -> tuple[int, ...]:
    """Return the memory of each device of the machine in MiB, as `nvidia-smi` reports it; empty without the program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        done = subprocess.run(
            [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = done.stdout.split() if done.returncode == 0 else []
    return tuple(int(line) for line in lines if line.isdigit())


def environment_for(devices: Sequence[str] | None) -> Mapping[str, str]:
    """Return the variables of a process that may see these devices alone; none for None, which hides nothing."""
    return {} if devices is None else {VISIBLE: ",".join(devices)}


@contextmanager
def seeing(devices: Sequence[str] | None) -> Generator[None]:
    """Show these devices alone to this process and its children within the block. None hides nothing.

    CUDA reads the variable once per process, when it is first used.
    """
    if devices is None:
        yield
        return
    changes = {ALL_DEVICES: ",".join(visible_devices()), **environment_for(devices)}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
