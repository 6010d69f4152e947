"""The reference policy of the KL penalties may be another model than the policy at the start."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.training.policy import load_reference
from tests.training.fakes import tiny_policy, tiny_tokenizer
from tests.training.test_ppo_trainer import changed


@pytest.fixture
def anchored(config: Config, tmp_path: Path) -> Config:
    """Return a run whose reference has other weights than the policy at the start."""
    tiny_policy(5).save_pretrained(tmp_path / "reference")
    return changed(config, "actor", reference_path=str(tmp_path / "reference"), kl_loss_coef=1.0)


def with_tokenizer(folder: Path, words: dict[str, int]) -> None:
    model = WordLevel(words, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="0").save_pretrained(folder)


def test_no_reference_is_loaded_without_a_penalty(config: Config) -> None:
    assert load_reference(config) is None


def test_a_reference_with_the_same_tokens_is_loaded(anchored: Config, tmp_path: Path) -> None:
    for folder in ("model", "reference"):
        tiny_tokenizer().save_pretrained(tmp_path / folder)

    reference = load_reference(anchored)

    assert reference is not None
    expected = tiny_policy(5).state_dict()["model.norm.weight"]
    assert reference.state_dict()["model.norm.weight"].equal(expected)


def test_a_reference_with_other_tokens_is_refused(anchored: Config, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    with_tokenizer(tmp_path / "reference", {"0": 0, "1": 2, "2": 1})

    with pytest.raises(ConfigError, match=r"vocabulary differs from the policy's in \d+ tokens \('1', "):
        load_reference(anchored)
