"""The reference policy may be a teacher: on-policy distillation by the KL penalty."""

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
from agent_loop.errors import ConfigError, TrainingError
from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from agent_loop.training.reference import load_reference
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row
from tests.training.fakes import FakeRollouts, tiny_policy, tiny_tokenizer
from tests.training.test_ppo_trainer import changed, train

STUDENT, TEACHER = 0, 5
"""Seeds of the weights."""


class ZeroRollouts(FakeRollouts):
    """Rollouts without any reward above 0."""

    def __init__(self) -> None:
        super().__init__(tiny_policy(STUDENT))

    async def run(self, rows: Sequence[Row], **options: Any) -> list[Trajectory]:
        trajectories = await super().run(rows, **options)
        return [structs.replace(trajectory, reward=0.0) for trajectory in trajectories]


@pytest.fixture
def taught(config: Config, tmp_path: Path) -> Config:
    """Return a run whose only signal is a teacher with other weights."""
    tiny_policy(TEACHER).save_pretrained(tmp_path / "teacher")
    config = changed(
        config,
        "actor",
        reference_path=str(tmp_path / "teacher"),
        kl_loss_coef=1.0,
        kl_loss_type="k2",
        lr=3e-3,
    )
    return changed(config, "trainer", total_steps=40, save_every=None, max_dead_steps=2)


def with_tokenizer(folder: Path, words: dict[str, int]) -> None:
    model = WordLevel(words, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="0").save_pretrained(folder)


def test_a_policy_without_a_reward_approaches_its_teacher(taught: Config) -> None:
    output = io.StringIO()

    result = train(taught, rollouts=ZeroRollouts(), console=Console(file=output, width=400))

    lines = list(read_metrics(result.run_dir / "metrics.jsonl"))
    divergences = [line[names.KL_LOSS] for line in lines]
    assert sum(divergences[-5:]) < 0.5 * sum(divergences[:5])
    assert {line[names.DEAD_STEPS] for line in lines} == {0.0}
    assert {line[names.ROWS_TRAINED] for line in lines} == {16.0}
    assert "nothing to learn from" not in output.getvalue()


def test_without_a_teacher_the_same_run_is_dead(taught: Config) -> None:
    with pytest.raises(TrainingError, match="all 16 rewards are 0"):
        train(changed(taught, "actor", reference_path=None), rollouts=ZeroRollouts())


def test_no_reference_is_loaded_without_a_penalty(config: Config) -> None:
    assert load_reference(config) is None


def test_a_teacher_with_the_same_tokens_is_loaded(taught: Config, tmp_path: Path) -> None:
    for folder in ("model", "teacher"):
        tiny_tokenizer().save_pretrained(tmp_path / folder)

    reference = load_reference(taught)

    assert reference is not None
    assert reference.state_dict()["model.norm.weight"].shape == (32,)


def test_a_teacher_with_other_tokens_is_refused(taught: Config, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    with_tokenizer(tmp_path / "teacher", {"0": 0, "1": 2, "2": 1})

    with pytest.raises(ConfigError, match=r"vocabulary differs from the policy's in \d+ tokens \('1', "):
        load_reference(taught)


def test_a_reference_without_a_penalty_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"actor\.reference_path is 'teacher', but no KL penalty compares with it"
    ):
        Config.model_validate({"actor": {"reference_path": "teacher"}})
