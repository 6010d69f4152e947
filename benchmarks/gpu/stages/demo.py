"""The task of `make demo` on the device: ten steps of GRPO with the embedded engine, in float32 and in bfloat16.

The tiny model has learnt the format on the CPU. The log-probs of engine and trainer differ by rounding alone.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from agent_loop.training import metrics as names
from benchmarks.gpu.report import Check, StageReport
from benchmarks.gpu.tasks import DEMO, make_demo_model, train

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest mean difference of log-probs between engine and trainer, by the type of the weights."""


def run(device: torch.device, report: StageReport) -> None:
    """Run the checks."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_demo_model(
            folder / "model", num_steps=300 if device.type == "cuda" else 20, first_step_share=0.33
        )
        for dtype in TOLERANCES:
            num_steps = 10 if device.type == "cuda" else 2
            with report.check(f"{num_steps} steps, {dtype}") as check:
                _train(check, folder, device, dtype=dtype, num_steps=num_steps)


def _train(check: Check, folder: Path, device: torch.device, *, dtype: str, num_steps: int) -> None:
    steps = train(
        DEMO,
        model=folder / "model",
        run_dir=folder / f"run-{dtype}",
        device=device,
        settings=[
            f"model.dtype={dtype}",
            f"trainer.total_steps={num_steps}",
            "data.val_files=[]",
            "algorithm.drop_zero_variance_groups=false",
        ],
    )
    rewards = [step[names.REWARD_MEAN] for step in steps]
    check.require(len(steps) == num_steps, f"{len(steps)} of {num_steps} steps ended")
    check.require(all(map(math.isfinite, rewards)), f"rewards are {rewards}")
    check.figure("first reward", rewards[0])
    check.figure("last reward", rewards[-1])
    check.figure("median step", statistics.median(step[names.STEP_SECONDS] for step in steps), "s")
    difference = max(step[names.LOGPROB_DIFF_MEAN] for step in steps)
    check.at_most("mean difference of log-probs", difference, TOLERANCES[dtype])
    check.figure("largest difference", max(step[names.LOGPROB_DIFF_MAX] for step in steps))
