"""Command that runs an example, from random weights to a trained agent.

    python -m examples.run two_hop_lookup --out runs/demo

It creates a tiny model, teaches it a format and a bad habit, trains the habit away with GRPO, and writes a report.
`agent-loop demo` runs it with the examples of the installed package.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from agent_loop.config import Config, SftConfig, load_config
from agent_loop.environments.tasks import load_suite
from agent_loop.errors import AgentLoopError
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_rows
from agent_loop.storage.metrics_file import METRICS_FILE
from agent_loop.tiny_models.model import make_model
from agent_loop.tiny_models.tokenizer import pad_id, train_tokenizer
from agent_loop.tools.registry import load_tools
from agent_loop.training.evaluation.scores import summarise
from agent_loop.training.export import evaluated_model
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.supervised.trainer import SupervisedTrainer
from agent_loop.trajectory import Trajectory
from agent_loop.types import Message, Row
from examples.catalog import RECIPES, Recipe
from examples.common.demonstrations import (
    Task,
    TaskWithDemonstrations,
    TaskWithModel,
    TaskWithTools,
    demonstrations,
)
from examples.common.report import ReportInput, TargetResult, print_comparison, write_report
from examples.common.warm_start import encode, warm_start

TOKENIZER_CONVERSATIONS = 2000
WARM_BATCH_SIZE = 8
WARM_LEARNING_RATE = 3e-5
"""Batch and learning rate of the supervised training of a pretrained model."""
LOGGED_EVERY = 100
"""Number of warm-start steps between two log lines."""
EXIT_NOT_PASSED = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("task", choices=list(RECIPES), help="the example to run")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (default: 0)")
    parser.add_argument("--out", type=Path, help="folder for model, run and report (default: runs/TASK)")
    parser.add_argument("--steps", type=int, help="GRPO steps (default: as in the example's config.yaml)")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="override a setting of the example's config.yaml, as in trainer.mode=async",
    )
    parser.add_argument("--skip-report", action="store_true", help="do not write curves.png and report.html")
    options = parser.parse_intermixed_args(arguments)

    transformers.utils.logging.disable_progress_bar()
    console = Console()
    try:
        return asyncio.run(
            run_example(
                options.task,
                seed=options.seed,
                out=options.out or Path("runs") / options.task,
                settings=[
                    *options.settings,
                    *([] if options.steps is None else [f"trainer.total_steps={options.steps}"]),
                ],
                writes_report=not options.skip_report,
                console=console,
            )
        )
    except AgentLoopError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return EXIT_ERROR


async def run_example(
    name: str, *, seed: int, out: Path, settings: Sequence[str], writes_report: bool, console: Console
) -> int:
    """Run one example from start to end and return the exit code."""
    recipe, log = RECIPES[name], StepLog(console)
    torch.set_num_threads(1)

    # 1. The data: held-out rows for the evaluation, and demonstrations of training rows.
    task: Any = importlib.import_module(f"examples.{name}.task")
    config = _load_config(name, seed=seed, out=out, model_path=out / "model", settings=settings)
    data = config.data
    val_rows = load_rows(data.val_files, prompt_key=data.prompt_key, workspace=data.workspace)
    tools = tool_schemas(task, config)
    conversations = conversations_of(task, recipe, rng=random.Random(seed))
    log(1, f"data: {len(val_rows)} held-out prompts, tools {[tool['function']['name'] for tool in tools]}")

    # 2. and 3. A model, and its warm start: the format, the tools, and in tiny models a bad habit.
    if isinstance(task, TaskWithModel):
        is_interrupted = await _warm_pretrained(task, recipe, config, conversations, tools=tools, log=log)
        if is_interrupted:
            return EXIT_INTERRUPTED
    else:
        texts = tokenizer_texts(task, conversations, merges_observations=recipe.merges_observations)
        _warm_tiny(recipe, config, conversations, texts, tools=tools, log=log)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(config.model.path)

    # 4. Success before training.
    before = await _evaluate(config, val_rows)
    log(4, f"before: success {_success(config, before):.1%} on held-out prompts, sampled at temperature 1")

    # 5. GRPO.
    log(5, f"GRPO: {config.trainer.total_steps} steps")
    result = await PPOTrainer(config, overwrite=True, console=console).fit()
    if result.is_interrupted:
        return EXIT_INTERRUPTED

    # 6. Success after training.
    trained_path = evaluated_model(result.run_dir)
    trained = _load_config(name, seed=seed, out=out, model_path=trained_path, settings=settings)
    after = await _evaluate(trained, val_rows)
    log(6, f"after: success {_success(config, after):.1%}")

    # 7. The report.
    verdict = _judge(recipe, before=_success(config, before), after=_success(config, after))
    report = ReportInput(
        title=name,
        subtitle=f"seed {seed}, {result.step} steps of GRPO, {log.seconds:.0f} s",
        verdict=verdict,
        before=before,
        after=after,
        success_threshold=config.reward.success_threshold,
        metrics=list(read_metrics(result.run_dir / METRICS_FILE)),
        right_answer=lambda row: right_answer(task, row),
        decode=lambda token_ids: str(tokenizer.decode(list(token_ids))),
    )
    print_comparison(report, console=console)
    if writes_report:
        log(7, f"report: {write_report(report, folder=out)}")
        if not find_spec("matplotlib"):
            log(7, 'the report has no curves; for them: pip install "agent-loop[demo]"')
    log(7, f"all trajectories: agent-loop view {result.run_dir}")

    # 8. The verdict.
    log(8, f"{'passed' if verdict.is_passed else 'NOT passed'}: {verdict.sentence}")
    return 0 if verdict.is_passed else EXIT_NOT_PASSED


def _warm_tiny(
    recipe: Recipe,
    config: Config,
    conversations: Iterator[list[Message]],
    texts: Iterator[list[Message]],
    *,
    tools: list[dict[str, Any]],
    log: StepLog,
) -> None:
    """Write a tokenizer and a model with random weights, after a warm start."""
    tokenizer = train_tokenizer(texts, tools=tools)
    model = make_model(tokenizer, seed=config.trainer.seed)
    log(2, f"model: {model.num_parameters():,} parameters, vocabulary {len(tokenizer)}")
    examples = encode(conversations, tokenizer=tokenizer, tools=tools)
    num_steps = recipe.warm_start_steps
    losses = warm_start(model, examples=examples, pad_id=pad_id(tokenizer), num_steps=num_steps)
    for step, loss in enumerate(losses, start=1):
        if step % LOGGED_EVERY == 0:
            log(3, f"warm start: step {step}/{num_steps}, loss {loss:.2f}")
    model.save_pretrained(config.model.path)
    tokenizer.save_pretrained(config.model.path)


async def _warm_pretrained(
    task: TaskWithModel,
    recipe: Recipe,
    config: Config,
    conversations: Iterator[list[Message]],
    *,
    tools: list[dict[str, Any]],
    log: StepLog,
) -> bool:
    """Write the task's pretrained model, after supervised training. Return whether Ctrl-C ended that."""
    out = Path(config.model.path).parent
    path = task.prepare_model(out.parent)
    log(2, f"model: {path}")
    chats = out / "demonstrations.jsonl"
    chats.parent.mkdir(parents=True, exist_ok=True)
    count = recipe.warm_start_steps * WARM_BATCH_SIZE
    lines = [json.dumps({"messages": messages, "tools": tools}) for messages in islice(conversations, count)]
    chats.write_text("\n".join(lines) + "\n", encoding="utf-8")
    optimizer = {"lr": WARM_LEARNING_RATE, "warmup_steps": 0, "decay_steps": recipe.warm_start_steps}
    supervised = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": str(path), "lora_rank": 0}),
            "sft": SftConfig(files=[str(chats)], batch_size=WARM_BATCH_SIZE),
            "actor": config.actor.model_copy(update=optimizer),
            "trainer": config.trainer.model_copy(
                update={"total_steps": recipe.warm_start_steps, "run_dir": str(out / "warm_start")}
            ),
        }
    )
    log(3, f"warm start: {count} demonstrations, {recipe.warm_start_steps} steps")
    result = await SupervisedTrainer(supervised, overwrite=True).fit()
    if not result.is_interrupted:
        shutil.rmtree(config.model.path, ignore_errors=True)
        shutil.copytree(evaluated_model(result.run_dir), config.model.path)
    return result.is_interrupted


def conversations_of(
    task: Task | TaskWithDemonstrations, recipe: Recipe, *, rng: random.Random
) -> Iterator[list[Message]]:
    """Return the demonstrations of the warm start."""
    if isinstance(task, TaskWithDemonstrations):
        return task.demonstrations(rng)
    assert recipe.habit is not None, "a task without demonstrations needs a habit"
    return demonstrations(task, rng=rng, habit=recipe.habit)


def tokenizer_texts(
    task: Task | TaskWithDemonstrations,
    conversations: Iterator[list[Message]],
    *,
    merges_observations: bool = False,
) -> Iterator[list[Message]]:
    """Yield the conversations that train the tokenizer.

    The observations of a named environment are left out, so that they have one token per character, unless
    `merges_observations` is set.
    """
    for messages in islice(conversations, TOKENIZER_CONVERSATIONS):
        leaves_out = isinstance(task, TaskWithDemonstrations) and not merges_observations
        yield [message for message in messages if not leaves_out or message["role"] != "user"]


def right_answer(task: Task | TaskWithDemonstrations, row: Mapping[str, Any]) -> str:
    """Return the last turn of a row's solution."""
    if isinstance(task, TaskWithDemonstrations):
        turns = load_suite(row["environment"]).solution(row)
        return "?" if not turns else ", ".join(turn.text for turn in turns)
    return str(task.solution(row)[-1]["content"])


def tool_schemas(task: Task | TaskWithDemonstrations, config: Config) -> list[dict[str, Any]]:
    """Return the schemas of the task's own tools if it has any, or those of the configured tools."""
    if isinstance(task, TaskWithTools):
        return task.tool_schemas()
    return [tool.tool_schema for tool in load_tools(config.rollout.multi_turn.tools).values()]


class StepLog:
    """Printer of log lines with the seconds since the start and the number of the step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def __call__(self, step: int, text: str) -> None:
        line = f"{self.seconds:6.1f} s  {step}  {text}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _load_config(name: str, *, seed: int, out: Path, model_path: Path, settings: Sequence[str]) -> Config:
    overrides = [
        f"model.path={model_path}",
        f"trainer.run_dir={out / 'train'}",
        *(f"{section}.seed={seed}" for section in ("data", "rollout", "trainer")),
        *settings,
    ]
    return load_config(f"examples/{name}/config.yaml", overrides=overrides)


async def _evaluate(config: Config, rows: Sequence[Row]) -> list[Trajectory]:
    async with AgentLoopManager.from_config(config) as manager:
        return await manager.run(rows, validate=True)


def _success(config: Config, trajectories: Sequence[Trajectory]) -> float:
    return summarise(trajectories, success_threshold=config.reward.success_threshold).success_share


def _judge(recipe: Recipe, *, before: float, after: float) -> TargetResult:
    return TargetResult(
        is_passed=before <= recipe.most_before and after >= recipe.least_after,
        sentence=f"success on held-out prompts went from {before:.1%} (required: at most {recipe.most_before:.0%}) "
        f"to {after:.1%} (required: at least {recipe.least_after:.0%})",
    )


if __name__ == "__main__":
    sys.exit(main())
