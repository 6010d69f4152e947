"""What rolling out ahead saves when tools are slow: time of training with it to that without.

    python benchmarks/bench_async.py [--quick] [--json FILE]

The two-hop look-up of the examples, on the embedded engine, with tools whose latency is log-normal: median 0.2 s, 99th
percentile 5 s. Every run trains the same number of trajectories from the same model; a step without rolling out ahead
waits for the slowest of them. Modes take turns, each training in a process of its own; those of a round draw the same
latencies, in the order of their calls. The table shows medians: the time of all steps, the CPU time of the training
and all below it, and the ratio of the times to `trainer.mode: sync`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import math
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from outcome import conclude
from overhead.processes import tree_cpu_seconds
from rich.console import Console
from rich.table import Table
from training_rounds import TASK_CONFIG, be_quiet, in_a_process, make_task_model

from agent_loop.config import load_config
from agent_loop.tools.base import ToolResponse
from agent_loop.tools.registry import load_tools
from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.run_folder import METRICS_FILE
from examples.two_hop_lookup import task

MEDIAN_S, P99_S = 0.2, 5.0
STANDARD_SCORE_OF_P99 = 2.326
WARM_START_STEPS = 300
BOUND_OF_TARGET, TARGET = 4, 0.6
"""The time of `async` with this bound, to that of `sync`."""


def latency_s(chance: random.Random) -> float:
    """Of one call."""
    sigma = math.log(P99_S / MEDIAN_S) / STANDARD_SCORE_OF_P99
    return chance.lognormvariate(math.log(MEDIAN_S), sigma)


class Slow:
    """Makes a tool wait before it answers."""

    chance = random.Random(0)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        await asyncio.sleep(latency_s(self.chance))
        answer: Any = await super().execute(instance_id, parameters, **kwargs)  # type: ignore[misc]
        return answer


class SlowPartOfOrder(Slow, task.PartOfOrder):
    pass


class SlowShelfOfPart(Slow, task.ShelfOfPart):
    pass


@dataclass(frozen=True, slots=True)
class Measured:
    """One training."""

    seconds: float
    """Of all steps."""
    cpu_s: float
    """From its start to its end."""
    waiting: float
    """Share of the time in which the trainer waits for rollouts."""
    staleness: float
    """Mean, in steps."""


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of a mode's rounds."""

    mode: str
    seconds: float
    cpu_s: float
    to_sync: float
    """Time."""
    waiting: float
    staleness: float


def train(model: Path, *, folder: Path, num_steps: int, bound: int, seed: int) -> Measured:
    """Args: bound: Of the staleness; 0 is `trainer.mode: sync`. seed: Of the latencies."""
    tools = ",".join(f"{__file__}:{tool.__name__}" for tool in (SlowPartOfOrder, SlowShelfOfPart))
    config = load_config(
        TASK_CONFIG,
        overrides=[
            f"model.path={model}",
            f"trainer.run_dir={folder}",
            f"trainer.total_steps={num_steps}",
            "trainer.save_every=null",
            f"rollout.multi_turn.tools=[{tools}]",
            *(["trainer.mode=async", f"trainer.max_staleness={bound}"] if bound else ["trainer.mode=sync"]),
        ],
    )
    for tool in load_tools(config.rollout.multi_turn.tools).values():
        cast(Slow, tool).chance.seed(seed)
    cpu_s = tree_cpu_seconds()
    asyncio.run(PPOTrainer(config, console=Console(file=io.StringIO())).fit())
    cpu_s = tree_cpu_seconds() - cpu_s
    steps = list(read_metrics(folder / METRICS_FILE))
    seconds = sum(step[names.STEP_SECONDS] for step in steps)
    return Measured(
        seconds,
        cpu_s,
        waiting=sum(step[f"{names.SECONDS}rollout"] for step in steps) / seconds,
        staleness=statistics.mean(step[names.STALENESS_MEAN] for step in steps),
    )


def mode_of(bound: int) -> str:
    return f"async, {bound}" if bound else "sync"


def results(rounds: Sequence[Mapping[int, Measured]]) -> list[Result]:
    """Args: rounds: By bound, each with that of `sync`."""
    return [
        Result(
            mode=mode_of(bound),
            seconds=statistics.median(each[bound].seconds for each in rounds),
            cpu_s=statistics.median(each[bound].cpu_s for each in rounds),
            to_sync=statistics.median(each[bound].seconds / each[0].seconds for each in rounds),
            waiting=statistics.median(each[bound].waiting for each in rounds),
            staleness=statistics.median(each[bound].staleness for each in rounds),
        )
        for bound in rounds[0]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round of four steps and one bound, not three of twelve and two; the target is not enforced",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args()
    be_quiet()
    num_rounds, num_steps, bounds = (1, 4, (0, 4)) if options.quick else (3, 12, (0, 1, 4))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_task_model(folder / "model", num_steps=WARM_START_STEPS)
        rounds: list[dict[int, Measured]] = []
        for seed in range(num_rounds):
            by_bound: dict[int, Measured] = {}
            for bound in bounds:
                by_bound[bound] = in_a_process(
                    train,
                    folder / "model",
                    folder=folder / f"run-{seed}-{bound}",
                    num_steps=num_steps,
                    bound=bound,
                    seed=seed,
                )
                Console(stderr=True).print(
                    f"round {seed + 1} of {num_rounds}, {mode_of(bound)}: {by_bound[bound].seconds:.0f} s"
                )
            rounds.append(by_bound)
    found = results(rounds)
    table = Table("mode", title=f"Trainings of {num_steps} steps")
    for column in ("seconds", "to sync", "CPU, s", "waits for rollouts", "staleness"):
        table.add_column(column, justify="right")
    for result in found:
        table.add_row(
            result.mode,
            f"{result.seconds:.1f}",
            f"{result.to_sync:.2f}",
            f"{result.cpu_s:.1f}",
            f"{result.waiting:.0%}",
            f"{result.staleness:.2f}",
        )
    Console().print(table)
    missed = [
        f"{result.mode}: {result.to_sync:.2f} of the time of sync, above {TARGET}"
        for result in found
        if result.mode == mode_of(BOUND_OF_TARGET) and result.to_sync > TARGET
    ]
    conclude(found, missed=missed, json_file=options.json, is_quick=options.quick)


if __name__ == "__main__":
    main()
