"""Devices of this machine, and their assignment to servers, trainer and reference model."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from agent_loop.config import Config
from agent_loop.config.placement import (
    IN_PROCESS,
    TENSOR_PARALLEL_OPTIONS,
    SplitConfig,
    devices_per_server,
)
from agent_loop.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ALL_DEVICES = "AGENT_LOOP_DEVICES"
"""Variable with the devices that a run may use, such as `0,1,2,3`. Unset means those of `CUDA_VISIBLE_DEVICES`, or else
all of the machine. A training sets it before it hides devices from itself."""
QUERY_TIMEOUT_S = 20.0

Devices: TypeAlias = tuple[str, ...]
"""Names of devices, as `CUDA_VISIBLE_DEVICES` lists them. Empty means the CPU."""


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
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.check_output(
            command, text=True, stderr=subprocess.DEVNULL, timeout=QUERY_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(int(line) for line in printed.split() if line.isdigit())


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
    before = {name: os.environ[name] for name in changes if name in os.environ}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)
        os.environ.update(before)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Devices of each part of a run. None leaves a part as it is: it sees what its parent sees."""

    servers: tuple[Devices, ...] | None = None
    """Devices of each server."""
    trainer: Devices | None = None
    """Device of each training process."""
    reference: str | None = None
    """Device of the reference model, if it has one of its own."""
    is_colocated: bool = False
    """Whether servers and trainer share devices."""

    def of_server(self, index: int) -> Devices | None:
        return None if self.servers is None else self.servers[index]

    def of_rank(self, rank: int) -> Devices | None:
        """Return the devices of a training process: its own, and on rank 0 that of the reference model."""
        if self.trainer is None:
            return None
        own = self.trainer[rank : rank + 1]
        return own if self.reference is None or rank else (*own, self.reference)


UNASSIGNED = Assignment()


def assign(config: Config, *, devices: Sequence[str], trains: bool = True) -> Assignment:
    """Return the devices of each part on a machine.

    Servers take the first devices, the trainer those after them, and a separate reference model the next. With
    `placement.colocated`, servers and trainer take the same devices. Without a device, or with `model.device: cpu`,
    every part is left as it is. Names of devices such as `1:0` have the node before the colon; a server does not span
    nodes. Rollouts alone (`trains=False`) need no devices for the trainer.
    """
    placement, rollout, processes = config.placement, config.rollout, config.trainer.num_processes
    if config.model.device == "cpu" or not (placement.is_set or devices):
        return UNASSIGNED
    per_server = devices_per_server(placement, rollout)
    if placement.colocated is not None:
        wanted = processes if placement.colocated == "all" else placement.colocated
        _require(wanted, devices, what=f"placement.colocated={placement.colocated} takes")
        if placement.colocated == "all" and wanted < len(devices):
            raise ConfigError(
                f"placement.colocated is 'all', but {len(devices)} devices are visible and trainer.num_processes is "
                f"{processes}; set trainer.num_processes={len(devices)} and rollout.num_servers="
                f"{len(devices) // per_server}, or placement.colocated={processes}"
            )
        taken = tuple(devices[:wanted])
        servers = None if rollout.engine in IN_PROCESS else _groups(taken, size=per_server)
        return Assignment(servers, taken, is_colocated=True)
    split, num_servers = placement.split, rollout.num_servers
    if split is None:
        if rollout.engine not in (*TENSOR_PARALLEL_OPTIONS, "embedded_process") or rollout.server_urls:
            return UNASSIGNED
        split = SplitConfig(servers=num_servers * per_server, trainer=processes)
    what = f"{split.servers // per_server} servers of {per_server} devices each"
    if trains:
        what += f" and {split.trainer + split.reference} devices of the trainer"
    _require(split.servers + (split.trainer + split.reference if trains else 0), devices, what=f"{what} take")
    for_servers, rest = tuple(devices[: split.servers]), tuple(devices[split.servers :])
    return Assignment(
        servers=_groups(for_servers, size=per_server)
        if split.servers
        else ((),) * (len(rollout.server_urls) or num_servers),
        trainer=rest[: split.trainer],
        reference=rest[split.trainer] if split.reference and len(rest) > split.trainer else None,
    )


def _require(wanted: int, devices: Sequence[str], *, what: str) -> None:
    if wanted > len(devices):
        found = f"{len(devices)} are visible ({', '.join(devices)})" if devices else "this machine has none"
        raise ConfigError(
            f"{what} {wanted} devices, but {found}; set placement=colocated to share devices, with the servers asleep "
            "while the trainer works, lower rollout.num_servers or trainer.num_processes, unset placement to run on a "
            "CPU, or name the devices in AGENT_LOOP_DEVICES"
        )


def _groups(devices: Devices, *, size: int) -> tuple[Devices, ...]:
    groups = tuple(devices[start : start + size] for start in range(0, len(devices), size))
    for group in groups:
        if len({name.rpartition(":")[0] for name in group}) > 1:
            raise ConfigError(
                f"a server would span nodes (devices {', '.join(group)}); choose a placement.tensor_parallel_size that "
                "divides the devices of a node"
            )
    return groups
