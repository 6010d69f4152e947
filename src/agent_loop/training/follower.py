"""A process that trains along with the one that leads.

On the leader's machine, `python -m agent_loop.training.follower PORT RANK SIZE` is one: the first line of its input is
the configuration, and when the input ends, the process does.
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
from agent_loop.training.team import LOOPBACK, join_team, leave_team, open_store


def follow(config: Config, *, local_rank: int, **meeting: Any) -> None:
    """Does what rank 0 does with the models, until it lets this process end. Ctrl-C is rank 0's to answer.

    Args:
        config: The same as rank 0's.
        local_rank: Which GPU of its machine is this process's.
        meeting: See `join_team`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transformers_logging.disable_progress_bar()
    device = device_of(config.model)
    if device.type == "cuda":
        torch.cuda.set_device(local_rank)
    team = join_team(device, **meeting)
    order = team.next_order()
    if order is not None:
        learner = load_learner(config, team=team, **order.arguments)
        while (order := team.next_order()) is not None:
            learner.obey(order)
    leave_team()


def main() -> None:
    """Trains until the leader lets it go."""
    port, rank, size = map(int, sys.argv[1:])
    config = Config.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_the_leader, daemon=True).start()
    store = open_store(size, host=LOOPBACK, port=port)
    try:
        follow(config, local_rank=rank, store=store, rank=rank, world_size=size)
    except AgentLoopError as error:
        sys.exit(f"process {rank}: {type(error).__name__}: {error}")


def _end_with_the_leader() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
