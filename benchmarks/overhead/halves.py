"""Workers at half speed on one core, and all other processes on another core. Linux only.

Two cores thus have the proportions of a cluster in which each worker has its own core.

    python -m overhead.halves PID [PID]

This command lets each of the processes run half of the time, alternating, from one line of its input to the next line.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path

from overhead.processes import pids_of_tree
from overhead.rounds import BENCHMARKS

WORKER_TITLE = "ray::WorkerActor"
"""Prefix of the titles of worker processes, set by Ray."""
TURN_S = 0.01
"""Time for which a process runs, and then is stopped."""


class AlternatingWorkers:
    """Assignment of cores to this process and its descendants. Workers get the first core.

    Args:
        num_workers: Number of running workers, one or two.

    Raises:
        RuntimeError: There are fewer than two cores, or another number of workers.
    """

    def __init__(self, *, num_workers: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise RuntimeError(
                f"workers and other processes need a core each, but this process can only use core {cores}"
            )
        tree = pids_of_tree()
        workers = [pid for pid in tree if _title(pid).startswith(WORKER_TITLE)]
        if len(workers) != num_workers:
            raise RuntimeError(
                f"found {len(workers)} processes with the title {WORKER_TITLE} instead of {num_workers}: {workers}"
            )
        _pin(workers, core=cores[0])
        _pin(tree - set(workers), core=cores[1])
        program = [sys.executable, "-m", "overhead.halves", *map(str, workers)]
        self._turns = subprocess.Popen(
            program, cwd=BENCHMARKS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @contextmanager
    def taking_turns(self) -> Iterator[None]:
        """Let each worker run half of the time within the context."""
        self._send("begin")
        try:
            yield
        finally:
            self._send("end")

    def close(self) -> None:
        self._turns.communicate()

    def _send(self, line: str) -> None:
        assert self._turns.stdin is not None
        assert self._turns.stdout is not None
        print(line, file=self._turns.stdin, flush=True)
        self._turns.stdout.readline()


def take_turns(pids: Sequence[int]) -> None:
    """Alternate between the processes from one input line to the next, and reply to each line with a line."""
    for _ in sys.stdin:
        print("begun", flush=True)
        try:
            for turn in cycle(range(2)):
                for number, pid in enumerate(pids):
                    os.kill(pid, signal.SIGCONT if number == turn else signal.SIGSTOP)
                if select.select([sys.stdin], [], [], TURN_S)[0]:
                    break
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        sys.stdin.readline()
        print("ended", flush=True)


def _title(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def _pin(pids: Iterable[int], *, core: int) -> None:
    """Pin all threads of the processes to a core. Later threads inherit the core."""
    for pid in pids:
        with suppress(OSError):  # (the process has just ended)
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})


if __name__ == "__main__":
    take_turns([int(pid) for pid in sys.argv[1:]])
