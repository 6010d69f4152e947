"""Credit by forking (`algorithm.adv_estimator: fork`) against GRPO, at an equal number of sampled tokens.

    python benchmarks/bench_fork_credit.py [TASK ...] [--seeds N ...] [--tokens N] [--json FILE] [--curves FILE]

All trainings of a task begin with the same model, with 16 prompts per step. `fork` has 4 trajectories per prompt, and
two continuations of each at its most uncertain turn, which are trained too. `fork, values only` uses their rewards
alone, as VinePPO does. `grpo` has 6 trajectories per prompt, so that a step samples about as many tokens; `grpo, more
steps` has 4. A training ends after the step in which it has sampled `--tokens` tokens, those of continuations included.

Success is that of the trajectories of the training steps, which are sampled at temperature 1 for prompts that were not
trained before. `area` is its mean over all tokens, `end` its mean over the last tenth of the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import io
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from numpy.typing import NDArray
from outcome import conclude
from rich.console import Console
from rich.table import Table
from training_rounds import run_in_new_process

from agent_loop.config import load_config
from agent_loop.storage.metrics_file import METRICS_FILE
from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from examples.common.warm_start import make_warm_model
from examples.run import RECIPES, tool_schemas

FloatArray: TypeAlias = NDArray[np.float64]

ARMS: dict[str, Sequence[str]] = {
    "grpo": ["rollout.n=6"],
    "grpo, more steps": ["rollout.n=4"],
    "fork": ["rollout.n=4", "algorithm.adv_estimator=fork"],
    "fork, values only": ["rollout.n=4", "algorithm.adv_estimator=fork", "algorithm.fork.train=false"],
}
STEPS_AT_ONCE = 5
"""Steps between two looks at the number of tokens."""
POINTS = 20
"""Points of a curve. Each is the mean over the tokens since the one before."""
END = 0.9
"""Share of the tokens after which the end of a training begins."""


@dataclass(frozen=True, slots=True)
class Result:
    """Curve of one training."""

    task: str
    arm: str
    seed: int
    tokens: Sequence[int]
    """Tokens that were sampled up to and with each step."""
    successes: Sequence[float]
    """Success in each step."""
    fork_share: float
    """Share of the continuations in all tokens."""

    def mean(self, *, start: float, end: float) -> float:
        """Return the mean success over a range of tokens, with straight lines between steps."""
        grid = np.linspace(start, end, 1000)
        return float(np.interp(grid, self.tokens, self.successes).mean())

    def means(self, grid: FloatArray) -> FloatArray:
        """Return the mean success between each two numbers of tokens."""
        return np.array([self.mean(start=start, end=end) for start, end in pairwise(grid)])


def train(task: str, arm: str, *, seed: int, num_tokens: int, model: str, folder: str) -> Result:
    """Train until `num_tokens` tokens are sampled."""
    seeds = [f"{section}.seed={seed}" for section in ("data", "rollout", "trainer")]
    folders = [f"model.path={model}", f"trainer.run_dir={folder}"]
    rare = ["trainer.save_every=1000", "trainer.keep_trajectories=0", "rollout.journal=false"]
    lines: list[Any] = []
    while not lines or _tokens(lines)[-1] < num_tokens:
        steps = [f"trainer.total_steps={len(lines) + STEPS_AT_ONCE}"]
        config = load_config(
            f"examples/{task}/config.yaml", overrides=[*seeds, *folders, *rare, *steps, *ARMS[arm]]
        )
        trainer = PPOTrainer(config, resume="auto", console=Console(file=io.StringIO()))
        asyncio.run(trainer.fit())
        lines = list(read_metrics(Path(folder) / METRICS_FILE))
    tokens = _tokens(lines)
    of_forks = sum(line.get(names.FORK_TOKENS, 0.0) for line in lines)
    return Result(
        task, arm, seed, tokens, [line[names.SUCCESS_SHARE] for line in lines], of_forks / tokens[-1]
    )


def make_model(task: str, path: str) -> None:
    """Create the model with which all trainings of a task begin."""
    recipe = RECIPES[task]
    module: Any = importlib.import_module(f"examples.{task}.task")
    assert recipe.habit is not None
    make_warm_model(
        Path(path),
        task=module,
        tools=tool_schemas(module, load_config(f"examples/{task}/config.yaml")),
        habit=recipe.habit,
        num_steps=recipe.warm_start_steps,
    )


def print_table(results: Sequence[Result], *, num_tokens: int, console: Console) -> None:
    """Print the area and the end of all curves, with the mean and the range over seeds."""
    table = Table("task", "credit", "steps", "tokens of forks", "area", "end", "seeds (area / end)", box=None)
    for task in dict.fromkeys(result.task for result in results):
        for arm in dict.fromkeys(result.arm for result in results if result.task == task):
            found = [result for result in results if (result.task, result.arm) == (task, arm)]
            areas = [each.mean(start=each.tokens[0], end=num_tokens) for each in found]
            ends = [each.mean(start=END * num_tokens, end=num_tokens) for each in found]
            table.add_row(
                task,
                arm,
                f"{statistics.fmean(sum(t < num_tokens for t in each.tokens) for each in found):.0f}",
                f"{statistics.fmean(each.fork_share for each in found):.0%}",
                f"{statistics.fmean(areas):.3f}",
                f"{statistics.fmean(ends):.3f}",
                ", ".join(f"{area:.3f} / {end:.3f}" for area, end in zip(areas, ends, strict=True)),
            )
    console.print(table)


def draw_curves(results: Sequence[Result], path: Path) -> None:
    """Draw the mean of the curves over seeds, and their range, in one plot per task."""
    tasks = list(dict.fromkeys(result.task for result in results))
    figure = Figure(figsize=(4.4 * len(tasks), 3.2), layout="constrained")
    FigureCanvasSVG(figure)
    for task, axes in zip(tasks, figure.subplots(1, len(tasks), squeeze=False)[0], strict=True):
        for arm in dict.fromkeys(result.arm for result in results if result.task == task):
            found = [result for result in results if (result.task, result.arm) == (task, arm)]
            grid = np.linspace(0, min(result.tokens[-1] for result in found), POINTS + 1)
            values = np.stack([result.means(grid) for result in found])
            color = f"C{list(ARMS).index(arm)}"
            axes.plot(grid[1:] / 1000, values.mean(axis=0), label=arm, linewidth=1.6, color=color)
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(grid[1:] / 1000, low, high, color=color, alpha=0.15, linewidth=0)
        axes.set(xlabel="thousand sampled tokens", ylabel="success", ylim=(0, 1.02), title=task)
        axes.grid(linewidth=0.4)
        axes.legend(frameon=False, loc="lower right", fontsize=8)
    cast(Any, figure).savefig(path, format="svg", metadata={"Date": None})


def _tokens(lines: Sequence[Any]) -> list[int]:
    each = [line[names.MODEL_TOKENS] + line.get(names.FORK_TOKENS, 0.0) for line in lines]
    return [int(total) for total in np.cumsum(each)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="chain and two_hop_search by default")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--models", type=Path, help="folder for the first models, which are made once")
    parser.add_argument("--curves", type=Path, help="SVG file for the curves")
    parser.add_argument("--json", type=Path, dest="json_file")
    options = parser.parse_args()
    console, results = Console(width=140), list[Result]()
    with tempfile.TemporaryDirectory() as folder:
        models = options.models or Path(folder)
        for task in options.tasks or ["chain", "two_hop_search"]:
            model = models / task
            if not model.exists():
                run_in_new_process(make_model, task, str(model))
            for seed in options.seeds:
                for arm in options.arms:
                    run_dir = str(Path(folder) / f"{task}-{seed}-{options.arms.index(arm)}")
                    arguments = {"num_tokens": options.tokens, "model": str(model), "folder": run_dir}
                    results.append(run_in_new_process(train, task, arm, seed=seed, **arguments))
                    print_table(results, num_tokens=options.tokens, console=console)
    if options.curves is not None:
        draw_curves(results, options.curves)
    conclude(results, missed=[], json_file=options.json_file, is_quick=True)


if __name__ == "__main__":
    main()
