"""Process group of a training: ranks that `torchrun` started, or that rank 0 starts on this machine or on Ray.

Rank 0 starts `python -m agent_loop.training.ranks PORT RANK LOCAL_RANK` for each rank on its own machine. The first
line of standard input is the configuration. The process ends when its standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self, TypeAlias

import torch
from torch.distributed import is_torchelastic_launched
from transformers.utils import logging as transformers_logging

from agent_loop.config import Config
from agent_loop.distributed.ray_ranks import RayRanks
from agent_loop.errors import AgentLoopError, ConfigError, ProcessGroupError
from agent_loop.planning.devices import (
    UNASSIGNED,
    Assignment,
    assign,
    environment_for,
    seeing,
    visible_devices,
)
from agent_loop.runtime.concurrency import running_in_background
from agent_loop.runtime.threads import run_in_thread
from agent_loop.training.learner import load_learner
from agent_loop.training.policy import device_of
from agent_loop.training.process_group import (
    LOOPBACK,
    SINGLE_PROCESS,
    ProcessGroup,
    join_process_group,
    leave_process_group,
    open_store,
)

RANK_MODULE = "agent_loop.training.ranks"
POLL_S = 0.2


class LocalRanks:
    """The ranks other than 0, as processes of this machine. A context manager."""

    def __init__(self, config: Config, *, grace_s: float, assignment: Assignment = UNASSIGNED) -> None:
        self.host = LOOPBACK
        self._assignment = assignment
        self._config = config
        self._grace_s = grace_s
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *, port: int) -> None:
        """Start the ranks, which reach rank 0 at `host`."""
        self._processes = [
            self._start(port=port, rank=rank) for rank in range(1, self._config.trainer.num_processes)
        ]

    async def wait_for_exit(self) -> str:
        """Wait until a rank ends, and describe which and how."""
        while True:
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() is not None:
                    return f"process {rank} ended with exit code {process.returncode}"
            await asyncio.sleep(POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(self._grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, *, port: int, rank: int) -> subprocess.Popen[str]:
        """Start a process in a session of its own, which Ctrl-C does not reach. It ends with its standard input."""
        devices = self._assignment.of_rank(rank)
        local_rank = rank if devices is None else 0  # the number among the devices that the process sees
        process = subprocess.Popen(
            [sys.executable, "-m", RANK_MODULE, str(port), str(rank), str(local_rank)],
            env={**os.environ, **environment_for(devices)},
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(self._config.model_dump_json() + "\n")
        process.stdin.flush()
        return process


GRACE_S = 10.0
"""Seconds that a stopped rank has to end, and seconds to wait for the exit of a rank after a collective call failed."""


OtherRanks: TypeAlias = LocalRanks | RayRanks
"""The ranks other than 0. When the context exits, they end; after `GRACE_S` they are killed."""


def is_nonzero_rank() -> bool:
    """Return whether `torchrun` started this process as a rank other than 0."""
    return is_torchelastic_launched() and int(os.environ["RANK"]) > 0


@contextmanager
def seeing_own_devices(config: Config) -> Generator[int]:
    """Show this training process its own devices alone, and yield the number of its GPU among those that it sees.

    Enter this before CUDA is used. The first process of a run on Ray gets its device from the cluster instead.
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
    """Start the process group of a training, as its rank 0. The other ranks end with the context."""
    size, device = config.trainer.num_processes, device_of(config.model)
    if is_torchelastic_launched():
        started = int(os.environ["WORLD_SIZE"])
        if size not in (1, started):
            raise ConfigError(
                f"trainer.num_processes is {size}, but torchrun started {started}; leave it out, or torchrun"
            )
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
    assignment, size = _assignment_of(config), config.trainer.num_processes
    if assignment.trainer is None and device.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.num_processes is {size}, but torch sees {torch.cuda.device_count()} GPUs; give each process "
            "one, or set model.device=cpu"
        )
    return LocalRanks(config, grace_s=GRACE_S, assignment=assignment)


def run_rank(config: Config, *, local_rank: int, **rendezvous: Any) -> None:
    """Run the commands of rank 0 until it stops this rank. Ctrl-C is ignored: rank 0 handles it.

    `local_rank` is the number of this process's GPU among those that it sees.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transformers_logging.disable_progress_bar()
    device = device_of(config.model)
    if device.type == "cuda":
        torch.cuda.set_device(local_rank)
    process_group = join_process_group(device, **rendezvous)
    command = process_group.next_command()
    if command is not None:
        learner = load_learner(config, process_group=process_group, **command.arguments)
        while (command := process_group.next_command()) is not None:
            learner.run_command(command)
    leave_process_group()


def connect_and_run_rank(config: Config, *, host: str, port: int, rank: int, local_rank: int) -> None:
    """Connect to the store of rank 0 and run its commands; see `run_rank`."""
    size = config.trainer.num_processes
    store = open_store(size, host=host, port=port)
    run_rank(config, local_rank=local_rank, store=store, rank=rank, world_size=size)


def main() -> None:
    port, rank, local_rank = map(int, sys.argv[1:])
    config = Config.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    try:
        connect_and_run_rank(config, host=LOOPBACK, port=port, rank=rank, local_rank=local_rank)
    except AgentLoopError as error:
        sys.exit(f"process {rank}: {type(error).__name__}: {error}")


def _end_with_rank_0() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
