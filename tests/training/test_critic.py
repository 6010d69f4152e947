"""The critic predicts the return at each token from the tokens before it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_loop.config import CriticConfig, ModelConfig
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training import metrics as names
from agent_loop.training.critic import Critic, load_critic
from tests.training.fakes import PAD, sample_trajectories, tiny_policy


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tiny_policy().save_pretrained(folder)
    return folder


def make_critic(
    folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 1, **settings: Any
) -> Critic:
    """Return a critic whose head is not 0."""
    model: Any = load_critic(CriticConfig(), model_config=ModelConfig(path=str(folder), device="cpu")).to(
        dtype
    )
    torch.nn.init.normal_(model.score.weight, std=0.5, generator=torch.Generator().manual_seed(seed))
    return Critic(model, config=CriticConfig(**{"lr": 1e-2, **settings}))


def make_batch() -> tuple[RolloutBatch, Tensor]:
    """Return a batch with its returns [B, R]."""
    batch = assemble(sample_trajectories(tiny_policy()), pad_token_id=PAD)
    generator = torch.Generator().manual_seed(0)
    return batch, torch.randn(batch["responses"].shape, generator=generator)


def all_rows(batch: RolloutBatch) -> Tensor:
    return torch.arange(len(batch))


def test_a_new_head_predicts_zero_and_the_other_weights_are_the_policys(policy_folder: Path) -> None:
    model: Any = load_critic(CriticConfig(), model_config=ModelConfig(path=str(policy_folder), device="cpu"))
    batch, _ = make_batch()

    assert not Critic(model, config=CriticConfig()).values(batch, rows=all_rows(batch)).any()
    policy = dict(tiny_policy().named_parameters())
    trunk = [(name, value) for name, value in model.named_parameters() if name.startswith("model.")]
    assert len(trunk) > 10
    assert all(torch.equal(value, policy[name]) for name, value in trunk)


def test_a_saved_head_is_loaded(policy_folder: Path, tmp_path: Path) -> None:
    critic = make_critic(policy_folder)
    critic.model.save_pretrained(tmp_path)
    batch, _ = make_batch()
    model_config = ModelConfig(path=str(policy_folder), device="cpu")

    for loaded in (
        load_critic(CriticConfig(path=str(tmp_path)), model_config=model_config),
        load_critic(CriticConfig(), model_config=model_config, path=tmp_path),
    ):
        values_BR = Critic(loaded, config=CriticConfig()).values(batch, rows=all_rows(batch))
        assert torch.equal(values_BR, critic.values(batch, rows=all_rows(batch)))
        assert values_BR.any()


@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_micro_batch": 50}, {"share_prefixes": False}])
def test_the_value_of_a_token_depends_on_the_tokens_before_it(
    policy_folder: Path, settings: dict[str, Any]
) -> None:
    critic, (batch, _) = make_critic(policy_folder, **settings), make_batch()
    rows = torch.tensor([1, 5, 20])

    values_BR = critic.values(batch, rows=rows)

    width = batch["prompts"].shape[1]
    for row in range(len(batch)):
        is_token = batch["attention_mask"][row].bool()
        num_prompt = int(is_token[:width].sum())
        length = int(is_token[width:].sum())
        expected = torch.zeros(length)
        if row in rows:
            with torch.no_grad():
                outputs = critic.model(batch["input_ids"][row][is_token][None]).logits[0, :, 0]
            expected = outputs[num_prompt - 1 : -1]
        is_model = batch["response_mask"][row, :length]
        torch.testing.assert_close(values_BR[row, :length], expected * is_model, atol=1e-5, rtol=1e-5)
        assert not values_BR[row, length:].any()


def test_updates_fit_values_to_returns_and_report_the_explained_variance(policy_folder: Path) -> None:
    critic, (batch, _) = make_critic(policy_folder, clip_range_value=None, grad_clip=10.0), make_batch()
    returns_BR = (batch["group"][:, None] - 1.5).expand(batch["responses"].shape)

    metrics = []
    for _ in range(30):
        old_BR = critic.values(batch, rows=all_rows(batch))
        metrics.append(critic.update(batch, returns_BR=returns_BR, old_values_BR=old_BR))

    assert metrics[-1][names.CRITIC_LOSS] < 0.2 * metrics[0][names.CRITIC_LOSS]
    assert metrics[0][names.EXPLAINED_VARIANCE] < 0.2
    assert metrics[-1][names.EXPLAINED_VARIANCE] > 0.7
    assert metrics[-1][names.RETURN_MEAN] == pytest.approx(
        float(returns_BR[batch["response_mask"].bool()].mean()), abs=1e-5
    )
    assert critic.optimizer.num_updates == 30


def test_a_critic_resumes_from_its_state_exactly(policy_folder: Path) -> None:
    batch, returns_BR = make_batch()
    old_BR = torch.zeros_like(returns_BR)
    first = make_critic(policy_folder, ppo_mini_batches=3)
    first.update(batch, returns_BR=returns_BR, old_values_BR=old_BR)

    second = make_critic(policy_folder, ppo_mini_batches=3)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for critic in (first, second):
        critic.update(batch, returns_BR=returns_BR, old_values_BR=old_BR)

    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
