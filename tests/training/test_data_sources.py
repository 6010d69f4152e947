"""`algorithm.by_data_source` estimates the rows of each source on their own, with settings of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from msgspec import structs

from agent_loop.config import AlgorithmConfig, Config
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import assemble
from agent_loop.training import metrics as names
from agent_loop.training.advantages.estimate import (
    BatchAdvantages,
    check_groups,
    estimate_batch,
    load_estimators,
)
from agent_loop.training.learner import load_learner
from tests.harness import examples
from tests.training.fakes import PAD, sample_trajectories, tiny_policy
from tests.training.samples import Branch, Rollout, Sample, Turn, batch_of, groups, samples_of

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


def test_the_sources_that_are_named_are_whitened_apart() -> None:
    samples = samples_of(
        [
            [Rollout((Branch(reward, (Turn(),)),), source=source) for reward in (low, high)]
            for source, low, high in [("math", 0.0, 1.0), ("code", 0.0, 100.0), (None, 5.0, 6.0)]
        ]
    )
    run = {"adv_estimator": "reinforce_plus_plus"}
    batch = batch_of(samples)

    def advantages(by_data_source: dict[str, Any]) -> list[float]:
        config = AlgorithmConfig(**run, by_data_source=by_data_source)
        return (
            estimate_batch(batch, estimators=load_estimators(config), response_length=9)
            .advantages_BR[:, 0]
            .tolist()
        )

    apart = advantages({"math": {}, "code": {}})
    assert apart[:2] == pytest.approx(apart[2:4], rel=1e-4)
    assert apart[4:] == pytest.approx(apart[:2], rel=1e-4)
    assert abs(advantages({})[0] - apart[0]) > 0.1


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


def test_a_learner_trains_on_two_sources(tmp_path: Path) -> None:
    tiny_policy().save_pretrained(tmp_path)
    by_data_source = {
        "a": {"adv_estimator": "rloo"},
        "b": {"adv_estimator": "gdpo", "reward_parts": {"x": 1}},
    }
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path), "device": "cpu"},
            "rollout": {"n": 6},
            "algorithm": {"by_data_source": by_data_source},
        }
    )
    trajectories = [
        structs.replace(t, row={**t.row, "data_source": "ab"[t.group % 2]}, reward_extra={"x": t.rollout})
        for t in sample_trajectories(tiny_policy(), seed=1)
    ]
    metrics = load_learner(config).learn(assemble(trajectories, pad_token_id=PAD))

    assert metrics[names.ROWS_TRAINED] > 12


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
