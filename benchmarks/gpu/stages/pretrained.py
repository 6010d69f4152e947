"""GRPO on a pretrained model, which is given with `--model`: products of the calculator example, and their curve."""

from __future__ import annotations

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from agent_loop.training import metrics as names
from benchmarks.gpu.report import NotRun, StageReport
from benchmarks.gpu.stage_process import ROOT
from benchmarks.gpu.tasks import train
from benchmarks.gpu.verdicts import NO_MODEL

CALCULATOR = ROOT / "examples" / "calculator" / "config.yaml"
TOLERANCE = 0.05
"""Largest mean difference of log-probs between engine and trainer, in bfloat16."""


def run(device: torch.device, report: StageReport) -> None:
    """Run the check."""
    with report.check("GRPO, bfloat16") as check:
        if report.model is None:
            raise NotRun(NO_MODEL)
        with TemporaryDirectory() as folder:
            steps = train(
                CALCULATOR,
                model=report.model,
                run_dir=Path(folder) / "run",
                device=device,
                settings=[
                    "model.dtype=bfloat16",
                    f"trainer.total_steps={10 if device.type == 'cuda' else 1}",
                    "data.val_files=[]",
                    "algorithm.drop_zero_variance_groups=false",
                    f"data.train_batch_size={16 if device.type == 'cuda' else 2}",
                    "rollout.prompt_length=1024",
                    f"rollout.response_length={512 if device.type == 'cuda' else 64}",
                    f"rollout.multi_turn.max_turn_tokens={200 if device.type == 'cuda' else 24}",
                    "actor.lr=2e-6",
                ],
            )
        for number, step in enumerate(steps, start=1):
            check.figure(f"success {number}", step[names.SUCCESS_SHARE])
        check.figure("median step", statistics.median(step[names.STEP_SECONDS] for step in steps), "s")
        check.at_most(
            "mean difference of log-probs", max(step[names.LOGPROB_DIFF_MEAN] for step in steps), TOLERANCE
        )
