"""Protocol between a driver and the sides, which run rounds on demand in their own processes. Needs only numpy."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from overhead.shapes import Shape, Workload

BENCHMARKS = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Round:
    """Measurements of one round, in which all trajectories of a scenario run concurrently."""

    cpu_s: float
    """CPU time as measured by the side."""
    wall_s: float
    digest: str
    """Digest of the prompts, responses, masks and log-probs of the batch."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Result of a round: padded arrays with one row per trajectory."""

    prompts: NDArray[np.int64]
    responses: NDArray[np.int64]
    response_mask: NDArray[np.int64]
    logprobs: NDArray[np.float32]

    def digest(self) -> str:
        whole = hashlib.sha256()
        for column in (self.prompts, self.responses, self.response_mask, self.logprobs):
            whole.update(f"{column.dtype} {column.shape}".encode())
            whole.update(np.ascontiguousarray(column).tobytes())
        return whole.hexdigest()


class Runner(ABC):
    """Base class of a side with the workload of one scenario."""

    async def start(self) -> None:
        """Start the resources of the side."""

    async def close(self) -> None:
        """Stop the resources of the side."""

    @abstractmethod
    async def run(self) -> Any:
        """Run all trajectories once. Only this method is timed."""

    @abstractmethod
    def columns(self, result: Any) -> Columns:
        """Return the result of `run` in a form that can be compared with other sides."""


def own_cpu_seconds() -> float:
    """Return the CPU time of this process with all threads, and of its ended children."""
    used = os.times()
    return time.process_time() + used.children_user + used.children_system


def serve(
    make: Callable[[Workload], Runner],
    folder: Path,
    *,
    cpu_seconds: Callable[[], float] = own_cpu_seconds,
    num_batches: int = 1,
) -> None:
    """Run a round for each scenario named by a line of stdin, and print its measurements as a line of JSON.

    Args:
        make: Creates the runner of a workload. Called when the scenario changes.
        folder: Folder of the workloads.
        cpu_seconds: Returns the CPU time that was used so far.
        num_batches: Number of batches in a round. Times are means per batch.
    """
    runner: Runner | None = None
    scenario = ""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # sends the prints of libraries to stderr
    with asyncio.Runner() as loop:
        for line in sys.stdin:
            if line.strip() != scenario:
                if runner is not None:
                    loop.run(runner.close())
                scenario = line.strip()
                runner = make(Workload.read(folder, scenario))
                loop.run(runner.start())
                _timed(runner, loop, cpu_seconds=cpu_seconds, num_batches=num_batches)
            assert runner is not None
            took = _timed(runner, loop, cpu_seconds=cpu_seconds, num_batches=num_batches)
            print(json.dumps(asdict(took)), file=answers, flush=True)
        if runner is not None:
            loop.run(runner.close())


def _timed(
    runner: Runner, loop: asyncio.Runner, *, cpu_seconds: Callable[[], float], num_batches: int
) -> Round:
    results: list[Any] = []

    async def run() -> None:
        # Return nothing: asyncio.Runner formats a returned value for an error message that it then discards.
        for _ in range(num_batches):
            results[:] = [await runner.run()]

    gc.collect()
    wall, cpu = time.perf_counter(), cpu_seconds()
    loop.run(run())
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    return Round(cpu / num_batches, wall / num_batches, runner.columns(results[0]).digest())


class Side:
    """Context manager of a process that serves rounds.

    Args:
        name: Name of the side.
        command: Command line of the process, run in the folder of the benchmarks.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [*command], cwd=BENCHMARKS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, scenario: str) -> Round:
        """Run one round.

        Raises:
            RuntimeError: The process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{scenario}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(
                f"the side {self.name} ended with status {self._process.wait()}; see its output above"
            )
        return Round(**json.loads(answer))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(shape: Shape, sides: Sequence[Side], *, num_rounds: int) -> dict[str, list[Round]]:
    """Run the rounds of all sides alternately, and return them by side.

    Raises:
        SystemExit: Two sides returned different results.
    """
    rounds: dict[str, list[Round]] = {side.name: [] for side in sides}
    for number in range(num_rounds):
        for side in sides if number % 2 else reversed(sides):
            rounds[side.name].append(side.run(shape.name))
    digests = {name: {each.digest for each in of_side} for name, of_side in rounds.items()}
    if len(set.union(*digests.values())) > 1:
        raise SystemExit(f"{shape.name}: the sides return different tokens, masks or log-probs: {digests}")
    return rounds
