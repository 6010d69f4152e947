"""Command that trains a model with random weights on a task on which it never succeeds, with and without a teacher.

    make demo
    python -m examples.learn_from_teacher --teacher runs/demo --out runs/student

The teacher is a trained run of `examples.run two_hop_lookup`. GRPO alone has nothing to learn from, and stops. The
student is then trained on the teacher's trajectories that were rewarded (`agent-loop sft`), and after that with GRPO.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from rich.console import Console

from agent_loop.config import Config, load_config
from agent_loop.errors import TrainingError
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_rows
from agent_loop.training.checkpoint import latest_checkpoint
from agent_loop.training.evaluation import summarise
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.supervised import SupervisedTrainer
from examples.common.model import make_model

TASK = "two_hop_lookup"
MOST_BEFORE, LEAST_AFTER = 0.01, 0.9
"""Success on held-out prompts with random weights, and at the end."""
EXIT_NOT_PASSED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.learn_from_teacher", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--teacher", type=Path, default=Path("runs/demo"), help="folder of the trained example"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/student"), help="folder of models and runs")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (default: 0)")
    parser.add_argument("--sft-steps", type=int, default=400, help="supervised steps (default: 400)")
    parser.add_argument("--steps", type=int, default=80, help="GRPO steps after them (default: 80)")
    options = parser.parse_args(arguments)

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    return asyncio.run(
        learn(
            options.teacher,
            out=options.out,
            seed=options.seed,
            sft_steps=options.sft_steps,
            steps=options.steps,
            console=Console(),
        )
    )


async def learn(teacher: Path, *, out: Path, seed: int, sft_steps: int, steps: int, console: Console) -> int:
    """Train a student with and without the teacher, and return the exit code."""
    started = time.monotonic()

    def log(text: str) -> None:
        console.print(f"{time.monotonic() - started:6.1f} s  {text}", highlight=False, soft_wrap=True)

    # 1. A model with the teacher's vocabulary and random weights.
    tokenizer = transformers.AutoTokenizer.from_pretrained(teacher / "model")
    make_model(tokenizer, seed=seed).save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    before = await _success(_config(out / "model", run_dir=out / "alone", seed=seed))
    log(f"random weights: success {before:.1%} on held-out prompts, sampled at temperature 1")

    # 2. GRPO alone has nothing to learn from.
    alone = _config(out / "model", run_dir=out / "alone", seed=seed)
    try:
        await PPOTrainer(alone, overwrite=True, console=console).fit()
    except TrainingError as error:
        log(f"GRPO alone stopped: {error}")

    # 3. The student learns from the teacher's rewarded trajectories.
    sft = _config(
        out / "model",
        run_dir=out / "sft",
        seed=seed,
        more=[
            f"sft.files=[{teacher / 'train'}]",
            "sft.where=[reward>=1, split=train]",
            f"trainer.total_steps={sft_steps}",
            "actor.lr=2e-3",
            "actor.warmup_steps=30",
            f"actor.decay_steps={sft_steps}",
            "actor.use_packing=true",
        ],
    )
    trained = await SupervisedTrainer(sft, overwrite=True, console=console).fit()
    warm = latest_checkpoint(trained.run_dir).model_path
    taught = await _success(_config(warm, run_dir=out / "grpo", seed=seed))
    log(f"after supervised training: success {taught:.1%}")

    # 4. GRPO goes on from there.
    grpo = _config(warm, run_dir=out / "grpo", seed=seed, more=[f"trainer.total_steps={steps}"])
    result = await PPOTrainer(grpo, overwrite=True, console=console).fit()
    after = await _success(
        _config(latest_checkpoint(result.run_dir).model_path, run_dir=out / "grpo", seed=seed)
    )
    log(f"after GRPO: success {after:.1%}")
    is_passed = before <= MOST_BEFORE and after >= LEAST_AFTER
    log(f"{'passed' if is_passed else 'NOT passed'}: {before:.1%}, {taught:.1%}, {after:.1%}")
    return 0 if is_passed else EXIT_NOT_PASSED


def _config(model: Path, *, run_dir: Path, seed: int, more: Sequence[str] = ()) -> Config:
    overrides = [
        f"model.path={model}",
        f"trainer.run_dir={run_dir}",
        *(f"{section}.seed={seed}" for section in ("data", "rollout", "trainer")),
        *more,
    ]
    return load_config(f"examples/{TASK}/config.yaml", overrides=overrides)


async def _success(config: Config) -> float:
    """Return the share of held-out prompts that are solved, sampled at temperature 1."""
    rows = load_rows(config.data.val_files, prompt_key=config.data.prompt_key)
    async with AgentLoopManager.from_config(config) as manager:
        trajectories = await manager.run(rows, validate=True)
    return summarise(trajectories, success_threshold=config.reward.success_threshold).success_share


if __name__ == "__main__":
    sys.exit(main())
