"""Tests that the metrics page lists all metrics."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from agent_loop.config import TraceConfig
from agent_loop.rollout.batch import timing_metrics
from agent_loop.training.evaluation.scores import summarise
from agent_loop.training.step_metrics import feedback_metrics, rollout_metrics
from tests.tracing.harness import run

PAGE = Path(__file__).parents[2] / "docs" / "generate_metrics.py"


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_metrics", PAGE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_matches_the_generator() -> None:
    module = generator()
    assert module.TARGET.read_text(encoding="utf-8") == module.render()


def test_every_metric_of_a_step_is_on_the_page() -> None:
    known = generator().step_metrics()
    trajectories = run(TraceConfig(), runs=[{"n": 2}])
    metrics = rollout_metrics(trajectories, success_threshold=1.0, weight_version=0)
    metrics |= timing_metrics(trajectories) | feedback_metrics(trajectories)
    metrics |= summarise(trajectories, success_threshold=1.0).metrics()
    prefixes = tuple(name for name in known if name.endswith("/"))
    assert len(metrics) > 30
    assert not [name for name in metrics if name not in known and not name.startswith(prefixes)]
