"""How a side runs rounds in a process of its own, on demand, and how a driver asks it to. Needs numpy alone."""

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
    """What one round took. All trajectories of a scenario at once."""

    cpu_s: float
    """As the side counts it."""
    wall_s: float
    digest: str
    """Of prompts, responses, masks and log-probs, as they would be trained on."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What a round must give: padded, one row per trajectory."""

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
    """One side, with the workload of one scenario loaded."""

    async def start(self) -> None:
        """Brings up what it needs."""

    async def close(self) -> None:
        """Ends what it brought up."""

    @abstractmethod
    async def run(self) -> Any:
        """Runs all trajectories once. This is what is timed."""

    @abstractmethod
    def columns(self, result: Any) -> Columns:
        """What `run` gave, to compare with other sides. Not timed."""


def own_cpu_seconds() -> float:
    """Of this process, all threads, and those below it that ended."""
    used = os.times()
    return time.process_time() + used.children_user + used.children_system


def serve(
    make: Callable[[Workload], Runner],
    folder: Path,
    *,
    cpu_seconds: Callable[[], float] = own_cpu_seconds,
    num_batches: int = 1,
) -> None:
    """Runs a round for each line of stdin, which names a scenario, and answers each with a line of JSON.

    Args:
        make: Makes the runner of a workload; is called when the scenario changes.
        folder: Where the workloads are.
        cpu_seconds: Counts what has been used so far.
        num_batches: A round runs its batch so often, one after the other, and gives the mean.
    """
    runner: Runner | None = None
    scenario = ""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
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
        # asyncio.Runner writes out what a coroutine returned, in an error that it drops: this one returns nothing.
        for _ in range(num_batches):
            results[:] = [await runner.run()]

    gc.collect()
    wall, cpu = time.perf_counter(), cpu_seconds()
    loop.run(run())
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    return Round(cpu / num_batches, wall / num_batches, runner.columns(results[0]).digest())


class Side:
    """A process that serves rounds, for `with`.

    Args:
        command: What to run, from the folder of the benchmarks.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [*command], cwd=BENCHMARKS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, scenario: str) -> Round:
        """One round.

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
                f"the side {self.name} ended with {self._process.wait()}; see what it printed above"
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
    """Rounds of all sides in turn.

    Raises:
        SystemExit: Two sides gave something else.
    """
    rounds: dict[str, list[Round]] = {side.name: [] for side in sides}
    for number in range(num_rounds):
        for side in sides if number % 2 else reversed(sides):
            rounds[side.name].append(side.run(shape.name))
    digests = {name: {held.digest for held in of_side} for name, of_side in rounds.items()}
    if len(set.union(*digests.values())) > 1:
        raise SystemExit(
            f"{shape.name}: the sides do not give the same tokens, masks and log-probs: {digests}"
        )
    return rounds
