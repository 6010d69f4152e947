"""Low-rank adapters are trained and the weights below them are not; servers get the merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agent_loop.config import ActorConfig, Config, ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training import metrics as names
from agent_loop.training.actor import Actor
from agent_loop.training.adapters import merged_adapters
from agent_loop.training.advantages.groups import grpo_advantages
from agent_loop.training.policy import load_policy, load_reference
from tests.training.fakes import PAD, sample_trajectories, tiny_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tiny_policy().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    return assemble(sample_trajectories(tiny_policy()), pad_token_id=PAD)


def settings(folder: Path, **others: Any) -> ModelConfig:
    return ModelConfig(**{"path": str(folder), "device": "cpu", "lora_rank": 4, **others})


def make_actor(config: ModelConfig, *, path: Path | None = None) -> Actor:
    return Actor(load_policy(config, path=path, seed=3), config=ActorConfig(lr=1e-2))


def train(actor: Actor, batch: RolloutBatch, *, steps: int = 2) -> dict[str, float]:
    advantages_BR = grpo_advantages(batch["reward"], groups_B=batch["group"])[:, None]
    return [actor.update(batch, advantages_BR=advantages_BR) for _ in range(steps)][-1]


def parameters(actor: Actor) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in actor.weights()}


def test_new_adapters_change_nothing_and_nothing_else_is_trained(folder: Path, batch: RolloutBatch) -> None:
    actor, plain = make_actor(settings(folder)), tiny_policy()

    trained = {name for name, value in actor.model.named_parameters() if value.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    mask_BR = batch["response_mask"].bool()
    torch.testing.assert_close(actor.logprobs(batch)[mask_BR], batch["rollout_log_probs"][mask_BR])
    assert parameters(actor).keys() == {name for name, _ in plain.named_parameters()}
    assert all(torch.equal(value, parameters(actor)[name]) for name, value in plain.named_parameters())


def test_an_update_changes_the_merged_weights_and_not_the_base(folder: Path, batch: RolloutBatch) -> None:
    actor, before = make_actor(settings(folder)), dict(tiny_policy().named_parameters())

    metrics = train(actor, batch)

    assert metrics[names.OPTIMIZER_STEPS] == 1
    for name, value in actor.model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(value, before[name.replace(".base_layer.", ".")])
            assert value.grad is None
    changed = {name for name, value in actor.weights() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}


def test_the_reference_is_the_policy_without_its_adapters(folder: Path, batch: RolloutBatch) -> None:
    model_config, config = settings(folder), Config()
    penalty = config.actor.model_copy(update={"kl_loss_coef": 0.1, "lr": 1e-2})
    config = config.model_copy(update={"model": model_config, "actor": penalty})
    policy = load_policy(model_config)
    reference = load_reference(config, policy=policy)
    assert reference is policy
    plain = load_reference(config)
    assert plain is not None
    assert not any(".lora_" in name for name, _ in plain.named_parameters())
    shared, separate = (
        Actor(load_policy(model_config) if each is plain else policy, config=penalty, reference=each)
        for each in (policy, plain)
    )

    found, expected = train(shared, batch), train(separate, batch)

    assert found == expected
    assert found[names.KL_LOSS] > 0
    rows = torch.arange(len(batch))
    references_BR = [actor.past_logprobs(batch, rows=rows).reference_BR for actor in (shared, separate)]
    assert references_BR[0] is not None
    assert references_BR[1] is not None
    assert torch.equal(references_BR[0], references_BR[1])
    assert not torch.equal(shared.logprobs(batch), references_BR[0])


def test_adapters_on_the_head_and_the_embeddings_resume_and_reach_the_servers(
    batch: RolloutBatch, tmp_path: Path
) -> None:
    untied = Qwen3ForCausalLM(Qwen3Config(**{**tiny_policy().config.to_dict(), "tie_word_embeddings": False}))
    untied.save_pretrained(tmp_path / "base")
    config = settings(tmp_path / "base", target_modules=["lm_head", "embed_tokens", "q_proj"])
    first = make_actor(config)
    train(first, batch)
    first.save(tmp_path / "adapters")

    second = make_actor(config, path=tmp_path / "adapters")

    assert all((".lora_" in name) == value.requires_grad for name, value in second.model.named_parameters())
    merged = merged_adapters(
        load_policy(settings(tmp_path / "base", lora_rank=0)), folder=tmp_path / "adapters"
    )
    untied.load_state_dict(dict(first.weights()))
    expected = first.model(input_ids=batch["input_ids"]).logits
    for model in (second.model, merged, untied.eval()):
        torch.testing.assert_close(model(input_ids=batch["input_ids"]).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("others", "what"),
    [
        (
            {"target_modules": ["nothing_like_this"]},
            r"model\.target_modules is \['nothing_like_this'\]: Target",
        ),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            r"uses the weight of lm_head in model\.embed_tokens too .* leave 'lm_head' out of",
        ),
        (
            {"target_modules": ["lm_head", "embed_tokens"]},
            r"uses the weight of model\.embed_tokens in lm_head too .* leave 'embed_tokens' out of",
        ),
        ({"lora_rank": 8}, r"model\.lora_rank is 8, but the adapters in .* have 4; set model\.lora_rank=4"),
        ({"lora_rank": 0}, r"model\.lora_rank is 0, but .* holds adapters; set it to the value of the run"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, others: dict[str, Any], what: str
) -> None:
    load_policy(settings(folder)).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=what):
        load_policy(settings(folder, **others), path=None if "target_modules" in others else tmp_path)


def test_a_checkpoint_without_adapters_is_refused_if_the_settings_have_adapters(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora_rank is 4, but .* holds no adapters"):
        load_policy(settings(folder), path=folder)
