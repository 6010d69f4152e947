"""Metrics of data sources equal a reference that counts each rollout."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from agent_loop.training.step_metrics import source_metrics
from tests.harness import examples
from tests.training.samples import Rollout, groups, samples_of

THRESHOLD = 0.5


@examples(100)
@given(groups=groups)
def test_sources_have_the_metrics_of_their_rollouts(groups: list[list[Rollout]]) -> None:
    trajectories = [sample.trajectory for sample in samples_of(groups)]
    rewards: defaultdict[Any, defaultdict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for t in trajectories:
        rewards[t.row.get("data_source")][t.group, t.rollout].extend([] if t.reward is None else [t.reward])
    expected: dict[str, float] = {}
    sources = [source for source in rewards if source is not None]
    for source in sources:
        scored = [each for each in rewards[source].values() if each]
        expected[f"by_source/{source}/rollouts"] = len(rewards[source])
        num_successes = sum(max(each) >= THRESHOLD for each in scored)
        expected[f"by_source/{source}/reward/success_share"] = num_successes / len(rewards[source])
        if scored:
            expected[f"by_source/{source}/reward/mean"] = float(np.mean([np.mean(each) for each in scored]))

    found = source_metrics(trajectories, sources=sources, success_threshold=THRESHOLD)

    assert found == pytest.approx(expected)
