"""Tests of real engines, skipped if an engine is not installed. `make test-engines` installs and runs all engines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENGINES = ("vllm", "sglang")
TIMEOUT_S = 600
"""Seconds for one test, including the start of its engine."""
FOR_CPUS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
    "DO_NOT_TRACK": "1",
}
"""Environment variables for CPU builds on a small machine without network."""

collect_ignore_glob = [f"test_{engine}_*.py" for engine in ENGINES if find_spec(engine) is None]

IS_ENGINE_ENVIRONMENT = any(find_spec(engine) is not None for engine in ENGINES)
if IS_ENGINE_ENVIRONMENT:
    for name, value in FOR_CPUS.items():
        os.environ.setdefault(name, value)


def pytest_configure(config: pytest.Config) -> None:
    """Do not turn warnings into errors, because engines warn of many things that this project cannot fix."""
    if IS_ENGINE_ENVIRONMENT:
        config.addinivalue_line("filterwarnings", "default")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Raise the time limit of all tests here, because engines take long to start."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
