"""What rolling out ahead saves when tools are slow: wall time of training with it to that without.

    python benchmarks/bench_async.py [--quick]

The two-hop look-up of the examples, on the embedded engine, with tools whose latency is log-normal: median 0.2 s, 99th
percentile 5 s. Every run trains the same number of trajectories from the same model; a step without rolling out ahead
waits for the slowest of them. The table shows the time of all steps, and its ratio to that of `trainer.mode: sync`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from agent_loop.config import Config, load_config
from agent_loop.tools.base import ToolResponse
from agent_loop.tools.registry import load_tools
from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.run_folder import METRICS_FILE
from examples.common.demonstrations import Habit, demonstrations
from examples.common.model import make_model
from examples.common.tokenizer import pad_id, train_tokenizer
from examples.common.warm_start import encode, warm_start
from examples.two_hop_lookup import task

MEDIAN_S, P99_S = 0.2, 5.0
STANDARD_SCORE_OF_P99 = 2.326
WARM_START_STEPS = 300
TARGET = 0.6


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


def make_policy(folder: Path) -> None:
    """A model that has learnt to call the tools most of the time."""
    tools = [
        tool.tool_schema
        for tool in load_tools(
            ["examples/two_hop_lookup/task.py:PartOfOrder", "examples/two_hop_lookup/task.py:ShelfOfPart"]
        ).values()
    ]
    conversations = demonstrations(task, rng=random.Random(0), habit=Habit(first_step_share=0.9))
    tokenizer = train_tokenizer(islice(conversations, 2000), tools=tools)
    model = make_model(tokenizer, seed=0)
    examples = encode(conversations, tokenizer=tokenizer, tools=tools)
    for _ in warm_start(model, examples=examples, pad_id=pad_id(tokenizer), num_steps=WARM_START_STEPS):
        pass
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def configured(model: Path, run_dir: Path, *, num_steps: int, settings: Sequence[str]) -> Config:
    here = Path(__file__)
    tools = ",".join(f"{here}:{tool.__name__}" for tool in (SlowPartOfOrder, SlowShelfOfPart))
    return load_config(
        here.parents[1] / "examples" / "two_hop_lookup" / "config.yaml",
        overrides=[
            f"model.path={model}",
            f"trainer.run_dir={run_dir}",
            f"trainer.total_steps={num_steps}",
            "trainer.save_every=null",
            f"rollout.multi_turn.tools=[{tools}]",
            *settings,
        ],
    )


def train(config: Config) -> list[dict[str, Any]]:
    """The metrics of each step."""
    asyncio.run(PPOTrainer(config, console=Console(file=io.StringIO())).fit())
    return list(read_metrics(Path(config.trainer.run_dir) / METRICS_FILE))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="four steps and one bound instead of twelve and two"
    )
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    num_steps, bounds = (4, [4]) if quick else (12, [1, 4])
    table = Table("mode", "seconds", "to sync", "waits for rollouts", "staleness", title=f"{num_steps} steps")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_policy(folder / "model")
        sync_s = 0.0
        for bound in (0, *bounds):
            mode = (
                ["trainer.mode=async", f"trainer.max_staleness={bound}"] if bound else ["trainer.mode=sync"]
            )
            config = configured(folder / "model", folder / f"run-{bound}", num_steps=num_steps, settings=mode)
            for tool in load_tools(config.rollout.multi_turn.tools).values():
                cast(Slow, tool).chance.seed(0)  # the same latencies for each mode, in the order of the calls
            lines = train(config)
            seconds = sum(line[names.STEP_SECONDS] for line in lines)
            sync_s = sync_s or seconds
            waiting = sum(line[f"{names.SECONDS}rollout"] for line in lines) / seconds
            table.add_row(
                f"async, {bound}" if bound else "sync",
                f"{seconds:.1f}",
                f"{seconds / sync_s:.2f}",
                f"{waiting:.0%}",
                f"{statistics.mean(line[names.STALENESS_MEAN] for line in lines):.2f}",
            )
    Console().print(table)
    Console().print(f"wanted: at most {TARGET} with a bound of 4")


if __name__ == "__main__":
    main()
