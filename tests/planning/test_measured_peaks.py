"""The plan of an update, compared with measured peaks of small models."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODELS = [
    "llama, float32",
    "qwen2, tied, large vocabulary",
    "qwen3, selective checkpointing",
    "qwen3, bfloat16",
    "mistral, LoRA",
    "qwen3_moe, 16 experts",
]
"""The benchmark has more models."""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
def test_the_planned_memory_of_an_update_is_within_15_percent_of_the_measured_peak(model: str) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/bench_plan.py", "--only", model],
        capture_output=True,
        text=True,
        check=False,
    )
    assert model in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
