"""Process of a rank other than 0, which runs the commands of rank 0.

Rank 0 starts `python -m agent_loop.training.rank_process PORT RANK LOCAL_RANK` on its own machine. The first line of
standard input is the configuration. The process ends when its standard input ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from agent_loop.config import Config
from agent_loop.errors import AgentLoopError
from agent_loop.training.learner import load_learner
from agent_loop.training.policy import device_of
from agent_loop.training.process_group import LOOPBACK, join_process_group, leave_process_group, open_store


def run_rank(config: Config, *, local_rank: int, **rendezvous: Any) -> None:
    """Run the commands of rank 0 until it stops this rank. Ctrl-C is ignored: rank 0 handles it.

    Args:
        config: Configuration of rank 0.
        local_rank: Number of this process's GPU among those that it sees.
        rendezvous: See `join_process_group`.
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
    """Connect to the store of rank 0 and run its commands.

    Args:
        config: Configuration of rank 0.
        host: Address of rank 0.
        port: Port of its store.
        rank: Number of this process.
        local_rank: Number of this process's GPU among those that it sees.
    """
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
