"""The ranks other than 0, as processes on this machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Self

from agent_loop.config import Config
from agent_loop.planning.devices import UNASSIGNED, Assignment, environment_for
from agent_loop.training.process_group import LOOPBACK

RANK_MODULE = "agent_loop.training.rank_process"
POLL_S = 0.2


class LocalRanks:
    """Implementation of `OtherRanks` for one machine. A context manager."""

    def __init__(self, config: Config, *, grace_s: float, assignment: Assignment = UNASSIGNED) -> None:
        self.host = LOOPBACK
        self._assignment = assignment
        self._config = config
        self._grace_s = grace_s
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *, port: int) -> None:
        self._processes = [
            self._start(port=port, rank=rank) for rank in range(1, self._config.trainer.num_processes)
        ]

    async def wait_for_exit(self) -> str:
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
