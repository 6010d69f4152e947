"""Whole runs with teachers on servers: what they learn, what they refuse, and how they resume."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from agent_loop.config import Config
from agent_loop.errors import ConfigError, RolloutError
from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row
from tests.training.fakes import VOCABULARY, FakeRollouts, tiny_policy, tiny_tokenizer
from tests.training.test_ppo_trainer import assert_same_policy, changed, train

STUDENT, TEACHER, OTHER_TEACHER = 0, 5, 6
"""Seeds of the weights."""


class RewardedRollouts(FakeRollouts):
    """Rollouts that all have the same reward."""

    def __init__(self, reward: float | None, *, sources: Sequence[str] = ()) -> None:
        super().__init__(tiny_policy(STUDENT))
        self._reward = reward
        self._sources = sources

    async def run(self, rows: Sequence[Row], **options: Any) -> list[Trajectory]:
        if self._sources:
            rows = [
                {**row, "data_source": self._sources[number % len(self._sources)]}
                for number, row in enumerate(rows)
            ]
        trajectories = await super().run(rows, **options)
        return [structs.replace(trajectory, reward=self._reward) for trajectory in trajectories]


@pytest.fixture
def taught(config: Config, tmp_path: Path) -> Config:
    """Return a run with a teacher of other weights. Rewards are those of the rollouts."""
    save_teacher(tmp_path / "teacher", TEACHER)
    config = changed(config, "actor", lr=1e-2, warmup_steps=0)
    config = changed(config, "rollout", prompt_length=16, response_length=16)
    config = changed(config, "trainer", total_steps=6, save_every=None, max_dead_steps=2)
    return with_distillation(config, teachers={"big": {"path": str(tmp_path / "teacher")}}, top_k=VOCABULARY)


def with_distillation(config: Config, **distillation: Any) -> Config:
    given = config.distillation.model_dump() | distillation
    return Config.model_validate(config.model_dump() | {"distillation": given})


def save_teacher(folder: Path, seed: int) -> None:
    tiny_policy(seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_metrics(run_dir / "metrics.jsonl"))


def test_a_policy_whose_rewards_are_all_zero_approaches_its_teacher(taught: Config) -> None:
    output = io.StringIO()

    result = train(taught, rollouts=RewardedRollouts(0.0), console=Console(file=output, width=400))

    lines = lines_of(result.run_dir)
    divergences = [line[names.TEACHER_KL + "big"] for line in lines]
    assert divergences[-1] < 0.5 * divergences[0]
    assert {line[names.TAUGHT_SHARE] for line in lines} == {1.0}
    assert {line[names.DEAD_STEPS] for line in lines} == {0.0}
    assert {line[names.ROWS_TRAINED] for line in lines} == {16.0}
    assert all(line[names.TEACHER_WAIT] >= 0 for line in lines)
    assert "nothing to learn from" not in output.getvalue()


@pytest.mark.parametrize("objective", ["reverse_kl", "sampled_kl", "reward"])
def test_one_step_with_any_objective_trains_rows_without_a_signal(taught: Config, objective: str) -> None:
    taught = changed(with_distillation(taught, objective=objective), "trainer", total_steps=1)

    result = train(taught, rollouts=RewardedRollouts(0.0))

    [line] = lines_of(result.run_dir)
    assert line[names.SIGNAL_SHARE] == 0
    assert line[names.ROWS_TRAINED] == 16
    assert line[names.GRAD_NORM] > 0
    assert line[names.TEACHER_KL + "big"] > 0
    assert (names.DISTILLATION_LOSS in line) == (objective != "reward")
    assert (line[names.ADVANTAGE_STD] > 0) == (objective == "reward")


def test_rewards_count_besides_the_teacher(taught: Config) -> None:
    taught = changed(taught, "trainer", total_steps=1)

    both, reward_alone, teacher_alone = (
        lines_of(train(with_distillation(taught, **values), overwrite=True).run_dir)[0]
        for values in ({}, {"coef": 0.0}, {"reward_coef": 0.0})
    )

    assert both[names.ADVANTAGE_STD] == reward_alone[names.ADVANTAGE_STD] > 0
    assert teacher_alone[names.ADVANTAGE_STD] == 0
    assert len({line[names.LOSS] for line in (both, reward_alone, teacher_alone)}) == 3


def test_each_source_has_its_own_teacher_and_rows_of_no_teacher_are_not_taught(
    taught: Config, tmp_path: Path
) -> None:
    save_teacher(tmp_path / "other", OTHER_TEACHER)
    teachers = {
        "big": {"path": str(tmp_path / "teacher"), "sources": ["math"]},
        "other": {"path": str(tmp_path / "other"), "sources": ["code"]},
    }
    taught = changed(with_distillation(taught, teachers=teachers), "trainer", total_steps=1)

    result = train(taught, rollouts=RewardedRollouts(0.0, sources=["math", "code", "poetry", "math"]))

    [line] = lines_of(result.run_dir)
    assert line[names.TEACHER_KL + "big"] != line[names.TEACHER_KL + "other"]
    assert line[names.TAUGHT_SHARE] == pytest.approx(3 / 4)
    assert line[names.ROWS_TRAINED] == 12


def test_a_run_that_is_resumed_asks_its_teachers_again_and_ends_with_the_same_weights(
    taught: Config, tmp_path: Path
) -> None:
    taught = changed(taught, "trainer", total_steps=4, save_every=2)
    whole = train(taught, rollouts=RewardedRollouts(0.0))

    parts = changed(taught, "trainer", run_dir=str(tmp_path / "parts"))
    train(changed(parts, "trainer", total_steps=2), rollouts=RewardedRollouts(0.0))
    resumed = train(parts, rollouts=RewardedRollouts(0.0), resume=True)

    assert_same_policy(whole, resumed)


def test_a_run_ends_with_the_reason_if_no_trajectory_can_be_scored(taught: Config, tmp_path: Path) -> None:
    teachers = {"big": {"path": str(tmp_path / "teacher"), "context_length": 4}}

    with pytest.raises(RolloutError, match=r"scored none of 16 trajectories \(16 by big \(too_long\)\)"):
        train(with_distillation(taught, teachers=teachers), rollouts=RewardedRollouts(0.0))


def test_a_teacher_with_other_tokens_is_refused_before_anything_runs(taught: Config, tmp_path: Path) -> None:
    words = WordLevel({"0": 0, "1": 2, "2": 1}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="0").save_pretrained(
        tmp_path / "teacher"
    )
    rollouts = RewardedRollouts(0.0)

    with pytest.raises(
        ConfigError, match=r"teachers\.big is .*differs from the policy's in \d+ tokens \('1', "
    ):
        train(taught, rollouts=rollouts)

    assert not rollouts.rows


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (
            {"server_url": "http://host:1", "engine": "vllm"},
            r"set distillation\.teachers\.big\.tokenizer_path",
        ),
        ({"path": "no/such/model"}, r"no tokenizer .*set distillation\.teachers\.big\.tokenizer_path"),
        ({"engine": "unheard_of"}, r"the server of distillation\.teachers\.big cannot be created: "),
    ],
)
def test_a_teacher_that_cannot_be_one_is_refused(
    taught: Config, teacher: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(with_distillation(taught, teachers={"big": teacher}), rollouts=RewardedRollouts(0.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"distillation": {"teachers": {"a": {"sources": ["x"]}, "b": {"sources": ["x", "y"]}}}},
            "2 of distillation.teachers teach the source 'x'",
        ),
        (
            {"distillation": {"teachers": {"a": {}, "b": {}}}},
            r"distillation\.teachers\.a and b both teach all sources",
        ),
        (
            {"distillation": {"teachers": {"a": {}}}, "rollout": {"temperature": 0.7}},
            r"rollout\.temperature is 0\.7, but distillation\.teachers score at temperature 1",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.model_validate(settings)
