"""Command that trains a model on a task on which it never succeeds, alone and with a teacher.

    make demo
    python -m examples.learn_from_teacher sft --teacher runs/demo --out runs/student
    python -m examples.learn_from_teacher distillation --teacher runs/demo --out runs/student

The teacher is a trained run of `examples.run two_hop_lookup`. GRPO alone has nothing to learn from, and stops.

`sft`: a student with random weights is trained on the teacher's rewarded trajectories, and after that with GRPO.
`distillation`: a student that knows the format and gives up is trained on its own samples, towards the teacher's
distribution at each token. It never sees a reward.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from agent_loop.config import Config, load_config
from agent_loop.errors import TrainingError
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_rows
from agent_loop.tiny_models.model import make_model
from agent_loop.tiny_models.tokenizer import pad_id
from agent_loop.training.checkpoint import latest_checkpoint
from agent_loop.training.evaluation.scores import summarise
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.supervised.trainer import SupervisedTrainer
from examples.common.demonstrations import Habit, demonstrations
from examples.common.warm_start import encode, warm_start
from examples.run import tool_schemas
from examples.two_hop_lookup import task

TASK = "two_hop_lookup"
MOST_BEFORE, LEAST_AFTER = 0.01, 0.9
"""Success on held-out prompts at the start and at the end."""
WARM_START_STEPS = 300
HABIT = Habit(first_step_share=0.05, later_step_share=0.3)
"""Demonstrations of the student that is distilled: one of 200 reaches the answer."""
STEPS = 80
"""Steps with rollouts."""
SFT_STEPS = 400
WHOLE_VOCABULARY = 1024
"""More than the number of tokens, so that whole distributions are compared."""
EXIT_NOT_PASSED = 1


@dataclass(frozen=True, slots=True)
class Student:
    """A student, and where its models and runs are."""

    teacher: Path
    """Folder of the trained example."""
    out: Path
    seed: int
    console: Console

    def config(self, model: Path, run: str, *settings: str) -> Config:
        """Return the configuration of a run of the task that starts from a model."""
        overrides = [
            f"model.path={model}",
            f"trainer.run_dir={self.out / run}",
            *(f"{section}.seed={self.seed}" for section in ("data", "rollout", "trainer")),
            *settings,
        ]
        return load_config(f"examples/{TASK}/config.yaml", overrides=overrides)

    async def train(self, config: Config) -> Path:
        """Train with rollouts, and return the model."""
        result = await PPOTrainer(config, overwrite=True, console=self.console).fit()
        return latest_checkpoint(result.run_dir).model_path

    async def success(self, model: Path) -> float:
        """Return the share of held-out prompts that a model solves, sampled at temperature 1."""
        config = self.config(model, "evaluation")
        rows = load_rows(config.data.val_files, prompt_key=config.data.prompt_key)
        async with AgentLoopManager.from_config(config) as manager:
            trajectories = await manager.run(rows, validate=True)
        return summarise(trajectories, success_threshold=config.reward.success_threshold).success_share

    def make(self, *, is_warm: bool) -> Path:
        """Write a model with the teacher's vocabulary: with random weights, or after a warm start."""
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self.teacher / "model")
        model, path = make_model(tokenizer, seed=self.seed), self.out / "model"
        if is_warm:
            tools = tool_schemas(task, load_config(f"examples/{TASK}/config.yaml"))
            conversations = demonstrations(task, rng=random.Random(self.seed), habit=HABIT)
            examples = encode(conversations, tokenizer=tokenizer, tools=tools)
            for _ in warm_start(
                model, examples=examples, pad_id=pad_id(tokenizer), num_steps=WARM_START_STEPS
            ):
                pass
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.learn_from_teacher", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "how", choices=["sft", "distillation"], help="how the student learns from the teacher"
    )
    parser.add_argument("--teacher", type=Path, default=Path("runs/demo"), help="the trained example")
    parser.add_argument("--out", type=Path, default=Path("runs/student"), help="folder of models and runs")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (default: 0)")
    parser.add_argument("--sft-steps", type=int, default=SFT_STEPS, help="supervised steps (default: 400)")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps with rollouts (default: 80)")
    options = parser.parse_args(arguments)

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    student = Student(options.teacher, options.out, options.seed, Console())
    return asyncio.run(learn(student, how=options.how, sft_steps=options.sft_steps, steps=options.steps))


async def learn(student: Student, *, how: str, sft_steps: int, steps: int) -> int:
    """Train a student alone and with its teacher, and return the exit code."""
    started = time.monotonic()

    def log(text: str) -> None:
        student.console.print(f"{time.monotonic() - started:6.1f} s  {text}", highlight=False, soft_wrap=True)

    # 1. The student.
    model = student.make(is_warm=how == "distillation")
    before = await student.success(model)
    log(f"before: success {before:.1%} on held-out prompts, sampled at temperature 1")

    # 2. GRPO alone has nothing to learn from.
    try:
        await student.train(student.config(model, "alone", f"trainer.total_steps={steps}"))
    except TrainingError as error:
        log(f"GRPO alone stopped: {error}")

    # 3. The teacher.
    try:
        if how == "sft":
            trained = await _learn_trajectories(student, model, sft_steps=sft_steps, steps=steps, log=log)
        else:
            trained = await student.train(distillation_config(student, model, steps=steps))
    except TrainingError as error:
        log(f"NOT passed: the training with a teacher stopped: {error}")
        return EXIT_NOT_PASSED
    after = await student.success(trained)
    is_passed = before <= MOST_BEFORE and after >= LEAST_AFTER
    log(f"{'passed' if is_passed else 'NOT passed'}: success went from {before:.1%} to {after:.1%}")
    return 0 if is_passed else EXIT_NOT_PASSED


async def _learn_trajectories(
    student: Student, model: Path, *, sft_steps: int, steps: int, log: Callable[[str], None]
) -> Path:
    """Train on the teacher's rewarded trajectories, then with GRPO, and return the model."""
    config = student.config(
        model,
        "sft",
        f"sft.files=[{student.teacher / 'train'}]",
        "sft.where=[reward>=1, split=train]",
        f"trainer.total_steps={sft_steps}",
        "actor.lr=2e-3",
        "actor.warmup_steps=30",
        f"actor.decay_steps={sft_steps}",
    )
    result = await SupervisedTrainer(config, overwrite=True, console=student.console).fit()
    taught = latest_checkpoint(result.run_dir).model_path
    log(f"after supervised training: success {await student.success(taught):.1%}")
    return await student.train(student.config(taught, "grpo", f"trainer.total_steps={steps}"))


def distillation_config(student: Student, model: Path, *, steps: int) -> Config:
    """Return the configuration of on-policy distillation without a reward.

    Nothing compares the trajectories of a prompt, so there are more prompts and fewer trajectories of each. The
    divergence of whole distributions is a smooth loss, so each rollout is used for several optimiser steps.
    """
    return student.config(
        model,
        "distillation",
        f"distillation.teachers.trained.path={latest_checkpoint(student.teacher / 'train').model_path}",
        f"distillation.top_k={WHOLE_VOCABULARY}",
        "distillation.reward_coef=0",
        "data.train_batch_size=32",
        "rollout.n=2",
        "actor.ppo_epochs=2",
        "actor.ppo_mini_batches=4",
        "actor.lr=2e-3",
        "actor.warmup_steps=5",
        f"actor.decay_steps={steps}",
        f"trainer.total_steps={steps}",
    )


if __name__ == "__main__":
    sys.exit(main())
