"""Training with slow tools, four steps ahead (`trainer.mode: async`) against step by step, on one device.

The tools' latency is log-normal with a median of 0.2 s and a 99th percentile of 5 s, as in `bench_async.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.gpu.report import StageReport
from benchmarks.gpu.stage_process import ROOT
from benchmarks.gpu.tasks import make_demo_model

NUM_STEPS = 6
STEPS_AHEAD = 4


def run(device: torch.device, report: StageReport) -> None:
    """Run the check."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from benchmarks.bench_async import train

    is_gpu = device.type == "cuda"
    with (
        report.check(f"{STEPS_AHEAD} steps ahead against step by step") as check,
        TemporaryDirectory() as name,
    ):
        folder = Path(name)
        make_demo_model(folder / "model", num_steps=200 if is_gpu else 20, first_step_share=0.9)
        measured = {
            bound: train(
                folder / "model",
                folder=folder / f"run-{bound}",
                num_steps=NUM_STEPS if is_gpu else 1,
                bound=bound,
                seed=0,
                device=device.type,
            )
            for bound in (0, STEPS_AHEAD)
        }
        check.figure("step by step", measured[0].seconds, "s")
        check.figure("ahead", measured[STEPS_AHEAD].seconds, "s")
        check.figure("ahead / step by step", measured[STEPS_AHEAD].seconds / measured[0].seconds)
        check.figure("staleness", measured[STEPS_AHEAD].staleness, "steps")
