"""Workers at half speed on one core, and another core for all else: on two cores, the proportions of a cluster in which
each worker has a core of its own. Linux.

    python -m overhead.halves PID [PID]

has each of these processes run half of the time, by turns, from one line of its input to the next one.
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
"""How Ray names their processes."""
TURN_S = 0.01
"""A process runs for so long, and is held for as long."""


class Halves:
    """The cores of this process and of all below it, shared out in this way: the first one is the workers'.

    Args:
        num_workers: One or two; they run already.
    """

    def __init__(self, *, num_workers: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise RuntimeError(
                f"workers and all else need a core each, but this process may use {cores} alone"
            )
        tree = pids_of_tree()
        workers = [pid for pid in tree if _title(pid).startswith(WORKER_TITLE)]
        if len(workers) != num_workers:
            raise RuntimeError(f"{workers} are called {WORKER_TITLE}, but there are {num_workers} workers")
        _pin(workers, core=cores[0])
        _pin(tree - set(workers), core=cores[1])
        program = [sys.executable, "-m", "overhead.halves", *map(str, workers)]
        self._turns = subprocess.Popen(
            program, cwd=BENCHMARKS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @contextmanager
    def taking_turns(self) -> Iterator[None]:
        """Meanwhile each worker runs half of the time."""
        self._say("begin")
        try:
            yield
        finally:
            self._say("end")

    def close(self) -> None:
        self._turns.communicate()

    def _say(self, what: str) -> None:
        assert self._turns.stdin is not None
        assert self._turns.stdout is not None
        print(what, file=self._turns.stdin, flush=True)
        self._turns.stdout.readline()


def take_turns(pids: Sequence[int]) -> None:
    """From one line of the input to the next one; each is answered with a line."""
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
    """All threads of them; those that they start later follow."""
    for pid in pids:
        with suppress(OSError):  # it has just ended
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})


if __name__ == "__main__":
    take_turns([int(pid) for pid in sys.argv[1:]])
