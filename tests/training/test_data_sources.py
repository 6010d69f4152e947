"""`algorithm.by_data_source` estimates the rows of each source on their own, with settings of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

from agent_loop.config import AlgorithmConfig, Config
from agent_loop.errors import ConfigError
from agent_loop.training.advantages.estimate import (
    BatchAdvantages,
    check_groups,
    estimate_batch,
    load_estimators,
)
from tests.harness import examples
from tests.training.samples import Rollout, Sample, batch_of, groups, samples_of

RUN: dict[str, Any] = {"adv_estimator": "grpo", "turn_reward_weight": 0.5}
SOURCES: dict[str, dict[str, Any]] = {
    "math": {"adv_estimator": "rloo", "overlong_buffer": 4},
    "code": {"adv_estimator": "turn_grpo", "gamma": 0.9, "turn_reward_weight": 1.0},
}


def estimated(samples: list[Sample], **algorithm: Any) -> BatchAdvantages:
    config = AlgorithmConfig(**algorithm)
    batch = batch_of(samples)
    return estimate_batch(
        batch,
        estimators=load_estimators(config),
        response_length=9,
        kl_BR=batch["response_mask"] / 16,
        is_allowed_B=torch.arange(len(batch)) % 5 != 0,
    )


def of_source(sample: Sample) -> str | None:
    return sample.trajectory.row.get("data_source")


@examples(60)
@given(groups=groups)
def test_each_source_has_the_advantages_that_it_has_alone(groups: list[list[Rollout]]) -> None:
    samples = samples_of(groups)
    found = estimated(samples, **RUN, by_data_source=SOURCES)

    for source in (None, "math", "code"):
        rows = [row for row, sample in enumerate(samples) if of_source(sample) == source]
        config = AlgorithmConfig(**{**RUN, **SOURCES.get(source or "", {})})
        batch = batch_of(samples)
        alone = estimate_batch(
            batch[torch.tensor(rows, dtype=torch.int64)],
            estimators=load_estimators(config),
            response_length=9,
            kl_BR=(batch["response_mask"] / 16)[rows],
            is_allowed_B=torch.tensor([row % 5 != 0 for row in rows], dtype=torch.bool),
        )
        assert torch.equal(found.advantages_BR[rows], alone.advantages_BR)
        assert torch.equal(found.keep_B[rows], alone.keep_B)
        assert torch.equal(found.has_signal_B[rows], alone.has_signal_B)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"adv_estimater": "rloo"}, r"by_data_source\.math has the setting 'adv_estimater'.*did you mean"),
        ({"kl_reward_coef": 0.1}, r"by_data_source\.math has the setting 'kl_reward_coef', which a source"),
        ({"gamma": 2}, r"by_data_source\.math: gamma is 2"),
        ({"adv_estimator": "gdpo"}, r"by_data_source\.math: .*reward_parts is empty"),
    ],
)
def test_a_setting_that_a_source_cannot_have_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Config.model_validate({"algorithm": {"by_data_source": {"math": changes}}})


@pytest.mark.parametrize(
    ("run", "source"), [("grpo", "gae"), ("grpo", "remax"), ("gae", "grpo"), ("remax", "rloo")]
)
def test_a_source_cannot_need_other_models_or_rollouts_than_the_run(run: str, source: str) -> None:
    config = AlgorithmConfig(adv_estimator=run, by_data_source={"math": {"adv_estimator": source}})
    with pytest.raises(ConfigError, match=f"math.adv_estimator is {source}, and algorithm.adv_estimator"):
        load_estimators(config)


def test_groups_of_one_are_refused_before_the_model_is_loaded() -> None:
    config = Config.model_validate(
        {
            "model": {"path": "/missing"},
            "rollout": {"n": 1},
            "algorithm": {
                "adv_estimator": "reinforce_plus_plus",
                "by_data_source": {"a": {"adv_estimator": "rloo"}},
            },
        }
    )
    with pytest.raises(ConfigError, match=r"rollout\.n is 1, but .*by_data_source\.a\.adv_estimator=rloo"):
        check_groups(config)
