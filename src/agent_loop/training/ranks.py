"""Start of a process group: ranks that `torchrun` started, or that rank 0 starts on this machine or on Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, Protocol

import torch
from torch.distributed import is_torchelastic_launched

from agent_loop.config import Config
from agent_loop.distributed.ray_ranks import RayRanks
from agent_loop.errors import ConfigError, ProcessGroupError
from agent_loop.planning.devices import UNASSIGNED, Assignment, assign, seeing, visible_devices
from agent_loop.runtime.concurrency import running_in_background
from agent_loop.runtime.threads import run_in_thread
from agent_loop.training.local_ranks import LocalRanks
from agent_loop.training.policy import device_of
from agent_loop.training.process_group import (
    SINGLE_PROCESS,
    ProcessGroup,
    join_process_group,
    leave_process_group,
    open_store,
)
from agent_loop.training.rank_process import connect_and_run_rank

GRACE_S = 10.0
"""Seconds that a stopped rank has to end, and seconds to wait for the exit of a rank after a collective call failed."""


class OtherRanks(AbstractContextManager[Any], Protocol):
    """The ranks other than 0. When the context exits, they end; after `GRACE_S` they are killed."""

    host: str
    """Address at which they reach rank 0."""

    def start(self, *, port: int) -> None:
        """Start the ranks.

        Args:
            port: Port of the store on rank 0.
        """
        ...

    async def wait_for_exit(self) -> str:
        """Wait until a rank ends, and describe which and how."""
        ...


def is_nonzero_rank() -> bool:
    """Return whether `torchrun` started this process as a rank other than 0."""
    return is_torchelastic_launched() and int(os.environ["RANK"]) > 0


@contextmanager
def seeing_own_devices(config: Config) -> Generator[int]:
    """Show this training process its own devices alone, and yield the number of its GPU among those that it sees.

    Enter this before CUDA is used. The first process of a run on Ray gets its device from the cluster instead.

    Raises:
        ConfigError: There are fewer devices than the parts of the run need.
    """
    local_rank = int(os.environ["LOCAL_RANK"]) if is_torchelastic_launched() else 0
    devices = _assignment_of(config).of_rank(local_rank)
    with seeing(devices):
        yield local_rank if devices is None else 0


def _assignment_of(config: Config) -> Assignment:
    if config.trainer.runtime == "ray":
        return UNASSIGNED
    return assign(config, devices=visible_devices())


@asynccontextmanager
async def start_process_group(config: Config) -> AsyncGenerator[ProcessGroup]:
    """Start the process group of a training, as its rank 0. The other ranks end with the context.

    Raises:
        ConfigError: The group cannot have that size.
        ProcessGroupError: Another rank ended while this one was running.
    """
    size, device = config.trainer.num_processes, device_of(config.model)
    if is_torchelastic_launched():
        _check_size_of_torchrun(size)
        async with _stopped_at_the_end(await run_in_thread(join_process_group, device)) as process_group:
            yield process_group
    elif size == 1:
        yield SINGLE_PROCESS
    else:
        with _create_other_ranks(config, device) as ranks:
            store = open_store(size, host=ranks.host)
            ranks.start(port=store.port)
            rendezvous = {"store": store, "rank": 0, "world_size": size}
            async with (
                _monitored(ranks, size=size),
                _stopped_at_the_end(
                    await run_in_thread(join_process_group, device, **rendezvous)
                ) as process_group,
            ):
                yield process_group


@asynccontextmanager
async def _stopped_at_the_end(process_group: ProcessGroup) -> AsyncGenerator[ProcessGroup]:
    try:
        yield process_group
    finally:
        if not process_group.is_in_command:
            process_group.stop_other_ranks()
            leave_process_group()


@asynccontextmanager
async def _monitored(ranks: OtherRanks, *, size: int) -> AsyncGenerator[None]:
    """Cancel the body when a rank ends."""
    scope, exits = asyncio.timeout(None), list[str]()

    async def monitor() -> None:
        exits.append(await ranks.wait_for_exit())
        scope.reschedule(asyncio.get_running_loop().time())

    def error_for(rank_exit: str) -> ProcessGroupError:
        return ProcessGroupError(
            f"of the {size} processes that train together, {rank_exit}; read its output above, and resume"
        )

    try:
        async with scope, running_in_background(monitor()):
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise error_for(exits[0]) from error
    except RuntimeError as error:  # torch.distributed raises it in a collective call
        try:
            async with asyncio.timeout(GRACE_S):
                rank_exit = await ranks.wait_for_exit()
        except TimeoutError:
            raise error from None
        raise error_for(rank_exit) from error


def _create_other_ranks(config: Config, device: torch.device) -> OtherRanks:
    if config.trainer.runtime == "ray":
        if device.type == "cuda" and config.trainer.ray.num_gpus_per_learner == 0:
            raise ConfigError(
                "trainer.ray.num_gpus_per_learner is 0 where training is on GPUs; set it to 1, or set model.device=cpu"
            )
        return RayRanks(config, run_rank=connect_and_run_rank, grace_s=GRACE_S)
    assignment = _assignment_of(config)
    if assignment.trainer is None:
        _check_gpus(config.trainer.num_processes, device)
    return LocalRanks(config, grace_s=GRACE_S, assignment=assignment)


def _check_size_of_torchrun(size: int) -> None:
    started = int(os.environ["WORLD_SIZE"])
    if size not in (1, started):
        raise ConfigError(
            f"trainer.num_processes is {size}, but torchrun started {started}; leave it out, or torchrun"
        )


def _check_gpus(size: int, device: torch.device) -> None:
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.num_processes is {size}, but torch sees {torch.cuda.device_count()} GPUs; give each process "
            "one, or set model.device=cpu"
        )
