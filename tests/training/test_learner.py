"""Updates of policy and critic from a batch, by every estimator, in every number format, and after a resume."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from agent_loop.config import ActorConfig, Config, CriticConfig, ModelConfig, parse_section
from agent_loop.errors import ConfigError, DataError
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training import metrics as names
from agent_loop.training.actor import Actor
from agent_loop.training.checkpoint import Checkpoint
from agent_loop.training.critic import Critic, load_critic
from agent_loop.training.learner import Learner, load_learner
from agent_loop.training.master_weights import MasterWeights
from agent_loop.training.optimizer import Optimizer
from agent_loop.training.policy import compute_dtype, load_reference
from agent_loop.types import StopReason
from tests.training.fakes import (
    PAD,
    REWARDED,
    advantages_of,
    sample_trajectories,
    sampled_batch,
    tiny_policy,
    tiny_tokenizer,
)


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    return sampled_batch(n=8)


GROUPED = ("grpo", "rloo", "remax", "gdpo", "turn_grpo", "gigpo")
ESTIMATORS = (*GROUPED, "gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def gdpo(**values: Any) -> dict[str, Any]:
    return {"algorithm": {"adv_estimator": "gdpo", **values}}


def by_source(**values: Any) -> dict[str, Any]:
    return {"algorithm": {"by_data_source": {"math": values}}}


def teachers(**teachers: Any) -> dict[str, Any]:
    return {"distillation": {"teachers": teachers}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (gdpo(), r"algorithm\.reward_parts is empty; name the parts"),
        (gdpo(reward_parts={"a": 1}, kl_reward_coef=0.1), "not among algorithm.reward_parts; add 'reward'"),
        (gdpo(reward_parts={"a": 1}, overlong_buffer=4), "not among algorithm.reward_parts; add 'reward'"),
        (gdpo(reward_parts={"a": 1}, turn_reward_weight=1), "not among .*reward_parts; add 'reward'"),
        (by_source(adv_estimater="rloo"), r"\.math has the setting 'adv_estimater'.*did you mean"),
        (by_source(kl_reward_coef=0.1), r"\.math has the setting 'kl_reward_coef', which a source"),
        (by_source(gamma=2), r"by_data_source\.math: gamma is 2"),
        (by_source(adv_estimator="gdpo"), r"by_data_source\.math: .*reward_parts is empty"),
        (teachers(a={"sources": ["x"]}, b={"sources": ["x", "y"]}), "2 of .* teach the source 'x'"),
        (teachers(a={}, b={}), r"distillation\.teachers\.a and b both teach all sources"),
        ({**teachers(a={}), "rollout": {"temperature": 0.7}}, r"temperature is 0\.7, .*at temperature 1"),
        ({"model": {"base_bits": 4}}, "model.lora_rank is 0, and weights of 4 bits cannot be trained"),
        ({"model": {"base_bits": 3, "lora_rank": 8}}, "model.base_bits is 3"),
        ({"model": {"base_bits": 4, "lora_rank": 8}, "trainer": {"num_processes": 2}}, "would shard the"),
    ],
)
def test_contradictory_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_section(Config, values, where="test")


def settings(folder: Path, **sections: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            **sections,
            "model": {"path": str(folder), "device": "cpu", **sections.get("model", {})},
            "actor": {"lr": 1e-3, **sections.get("actor", {})},
            "critic": {"lr": 1e-2, **sections.get("critic", {})},
        }
    )


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in learner.weights()}


def are_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_raises_rewards(policy_folder: Path, batch: RolloutBatch, estimator: str) -> None:
    algorithm = {"adv_estimator": estimator, "kl_reward_coef": 1e-3, "turn_reward_weight": 0.5}
    config = settings(policy_folder, algorithm={**algorithm, "reward_parts": {"reward": 1}})
    learner = load_learner(config)
    baselines = dict.fromkeys(range(4), 0.1) if estimator == "remax" else None
    metrics = [learner.learn(batch, baseline_rewards=baselines) for _ in range(4)]
    with_tokens = Actor(learner.model, config=config.actor).logprobs(batch)
    is_rewarded_BR = (batch["responses"] == REWARDED) & batch["response_mask"].bool()
    gain_BR = with_tokens - batch["rollout_log_probs"]
    assert float(gain_BR[is_rewarded_BR].mean()) > 0.05
    assert metrics[0][names.KL_TO_REFERENCE] == pytest.approx(0, abs=1e-6)
    assert metrics[0][names.ROWS_TRAINED] > 0
    assert 0 < metrics[0][names.SIGNAL_SHARE] <= 1
    assert (names.CRITIC_LOSS in metrics[0]) == (estimator == "gae")


def test_remax_needs_greedy_rewards_and_skips_other_prompts(policy_folder: Path, batch: RolloutBatch) -> None:
    learner = load_learner(settings(policy_folder, algorithm={"adv_estimator": "remax"}))
    metrics = learner.learn(batch, baseline_rewards={0: 0.5, 1: math.nan, 3: 0.0})
    assert metrics[names.ROWS_TRAINED] == 16
    with pytest.raises(DataError, match="give baseline_rewards"):
        learner.learn(batch)


def test_truncated_trajectories_are_not_trained(policy_folder: Path) -> None:
    trajectories = sample_trajectories(tiny_policy(), num_groups=4, n=8)
    for row in range(0, 32, 8):
        output = dataclasses.replace(trajectories[row].output, stop_reason=StopReason.RESPONSE_LENGTH)
        trajectories[row] = structs.replace(trajectories[row], output=output)
    batch = assemble(trajectories, pad_token_id=PAD)
    for reasons, num_trained in (([], 32), (["response_length"], 28)):
        algorithm = {"drop_zero_variance_groups": False, "untrained_stop_reasons": reasons}
        metrics = load_learner(settings(policy_folder, algorithm=algorithm)).learn(batch)
        assert metrics[names.ROWS_TRAINED] == num_trained


@pytest.mark.parametrize("old", ["rollout", "recompute"])
def test_the_kl_penalty_lowers_each_reward(policy_folder: Path, batch: RolloutBatch, old: str) -> None:
    """If there is no other reward and the critic predicts 0, an advantage is minus the sum of the later penalties."""
    config = settings(
        policy_folder,
        algorithm={"adv_estimator": "gae", "whiten_advantages": False, "kl_reward_coef": 0.5},
        actor={"old_log_probs": old},
    )
    learner = load_learner(config)
    with torch.no_grad():
        learner.model.get_output_embeddings().weight[REWARDED] *= 4
    flat = batch.clone()
    flat["reward"] = torch.zeros(len(batch))
    flat["rollout_log_probs"] = batch["rollout_log_probs"] + 0.1
    old_BR = flat["rollout_log_probs"]
    if old == "recompute":
        old_BR = Actor(learner.model, config=config.actor).logprobs(batch)
    reference_BR = Actor(tiny_policy(), config=config.actor).logprobs(batch)
    kls = [(old_BR - reference_BR)[row][mask.bool()] for row, mask in enumerate(batch["response_mask"])]
    later_penalties = torch.cat([kl.flip(0).cumsum(0) for kl in kls])
    metrics = learner.learn(flat)
    assert metrics[names.KL_TO_REFERENCE] == pytest.approx(float(torch.cat(kls).mean()), abs=1e-5)
    assert metrics[names.ADVANTAGE_MEAN] == pytest.approx(-0.5 * float(later_penalties.mean()), abs=1e-5)
    assert abs(metrics[names.ADVANTAGE_MEAN]) > 0.01


def test_only_the_critic_is_trained_during_its_warmup(policy_folder: Path, batch: RolloutBatch) -> None:
    config = settings(policy_folder, algorithm={"adv_estimator": "gae"}, critic={"head_start": 2})
    learner = load_learner(config)
    before = weights(learner)
    alone = [learner.learn(batch) for _ in range(2)]
    still = weights(learner)
    together = learner.learn(batch)
    assert are_equal(before, still)
    assert not are_equal(before, weights(learner))
    assert all(names.CRITIC_LOSS in metrics and names.LOSS not in metrics for metrics in alone)
    assert names.LOSS in together
    assert len({metrics[names.VALUE_MEAN] for metrics in (*alone, together)}) == 3


@pytest.mark.parametrize("model", [{}, {"lora_rank": 2}, {"dtype": "bfloat16"}])
def test_a_checkpoint_contains_all_trained_state(
    policy_folder: Path, batch: RolloutBatch, tmp_path: Path, model: dict[str, Any]
) -> None:
    config = settings(policy_folder, algorithm={"adv_estimator": "gae"}, model=model)
    first = load_learner(config)
    first.learn(batch)
    first.save(tmp_path)
    second = load_learner(config, checkpoint=Checkpoint(path=tmp_path, step=1, config={}))
    first_metrics, second_metrics = first.learn(batch), second.learn(batch)
    assert second_metrics == pytest.approx(first_metrics, rel=1e-4, abs=1e-6)
    assert second_metrics[names.CRITIC_LOSS] == pytest.approx(first_metrics[names.CRITIC_LOSS], rel=1e-6)
    resumed = weights(second)
    for name, value in first.weights():
        torch.testing.assert_close(value, resumed[name], atol=1e-6, rtol=0)
    if "dtype" in model:  # the saved weights have more digits than those of the servers
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
        assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())


def test_the_reference_of_a_kl_penalty_may_be_another_model_with_the_same_tokens(tmp_path: Path) -> None:
    config = settings(tmp_path / "model")
    assert load_reference(config) is None
    config = settings(
        tmp_path / "model", actor={"reference_path": str(tmp_path / "reference"), "kl_loss_coef": 1.0}
    )
    for folder, seed in (("model", 0), ("reference", 5)):
        tiny_policy(seed).save_pretrained(tmp_path / folder)
        tiny_tokenizer().save_pretrained(tmp_path / folder)
    reference = load_reference(config)
    assert reference is not None
    assert are_equal(tiny_policy(5).state_dict(), reference.state_dict())
    words = WordLevel({"0": 0, "1": 2, "2": 1}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="0")
    tokenizer.save_pretrained(tmp_path / "reference")
    with pytest.raises(ConfigError, match=r"vocabulary differs from the policy's in \d+ tokens \('1', "):
        load_reference(config)


def new_critic(folder: Path, *, saved: Path | None = None, **settings: Any) -> Critic:
    model_config = ModelConfig(path=str(folder), device="cpu")
    config = CriticConfig(**{"lr": 1e-2, **settings})
    return Critic(load_critic(config, model_config=model_config, path=saved), config=config)


def make_critic(folder: Path, **settings: Any) -> Critic:
    """Return a critic whose head is not 0."""
    critic = new_critic(folder, **settings)
    torch.nn.init.normal_(critic.model.score.weight, std=0.5, generator=torch.Generator().manual_seed(1))
    return critic


def values_of(critic: Critic, batch: RolloutBatch) -> Tensor:
    return critic.values(batch, rows=torch.arange(len(batch)))


def test_a_head_is_zero_unless_it_was_saved(policy_folder: Path, batch: RolloutBatch, tmp_path: Path) -> None:
    new, trained = new_critic(policy_folder), make_critic(policy_folder)
    assert not values_of(new, batch).any()
    policy = dict(tiny_policy().named_parameters())
    trunk = [(name, value) for name, value in new.model.named_parameters() if name.startswith("model.")]
    assert len(trunk) > 10
    assert all(torch.equal(value, policy[name]) for name, value in trunk)
    trained.model.save_pretrained(tmp_path)
    assert values_of(trained, batch).any()
    for options in ({"path": str(tmp_path)}, {"saved": tmp_path}):
        loaded = new_critic(policy_folder, **options)
        assert torch.equal(values_of(loaded, batch), values_of(trained, batch))


@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_micro_batch": 50}, {"share_prefixes": False}])
def test_the_value_of_a_token_depends_on_the_tokens_before_it(
    policy_folder: Path, batch: RolloutBatch, settings: dict[str, Any]
) -> None:
    critic, rows = make_critic(policy_folder, **settings), torch.tensor([1, 5, 20])
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


def test_updates_fit_values_and_report_explained_variance(policy_folder: Path, batch: RolloutBatch) -> None:
    critic = make_critic(policy_folder, clip_range_value=None, grad_clip=10.0)
    returns_BR = (batch["group"][:, None] - 1.5).expand(batch["responses"].shape)
    metrics = [
        critic.update(batch, returns_BR=returns_BR, old_values_BR=values_of(critic, batch)) for _ in range(30)
    ]
    assert metrics[-1][names.CRITIC_LOSS] < 0.2 * metrics[0][names.CRITIC_LOSS]
    assert metrics[0][names.EXPLAINED_VARIANCE] < 0.2
    assert metrics[-1][names.EXPLAINED_VARIANCE] > 0.7
    mean = float(returns_BR[batch["response_mask"].bool()].mean())
    assert metrics[-1][names.RETURN_MEAN] == pytest.approx(mean, abs=1e-5)
    assert critic.optimizer.num_updates == 30


def make_actor(dtype: torch.dtype | None, **settings: Any) -> Actor:
    return Actor(tiny_policy(), config=ActorConfig(**{"lr": 1e-3, **settings}), dtype=dtype)


def train(actor: Actor, batch: RolloutBatch, *, num_updates: int) -> list[dict[str, float]]:
    advantages_BR = advantages_of(batch)
    return [actor.update(batch, advantages_BR=advantages_BR) for _ in range(num_updates)]


@pytest.mark.parametrize("saves_memory", [False, True])
def test_losses_in_bfloat16_are_close_to_float32_and_the_policy_learns_as_fast(saves_memory: bool) -> None:
    batch = sampled_batch(n=12)
    settings = {"ppo_mini_batches": 2, "gradient_checkpointing": saves_memory}
    actors = [make_actor(dtype, **settings) for dtype in (None, torch.bfloat16)]
    expected, ours = (train(actor, batch, num_updates=8) for actor in actors)
    assert {value.dtype for _, value in actors[1].weights()} == {torch.bfloat16}
    for own, other in zip(ours, expected, strict=True):
        assert own[names.LOSS] == pytest.approx(other[names.LOSS], abs=0.02)
    assert ours[0][names.GRAD_NORM] == pytest.approx(expected[0][names.GRAD_NORM], rel=0.1)
    is_rewarded_BR = (batch["responses"] == REWARDED) & batch["response_mask"].bool()
    gains = [
        float((actor.logprobs(batch) - batch["rollout_log_probs"])[is_rewarded_BR].mean()) for actor in actors
    ]
    assert gains[0] > 0.1
    assert gains[1] == pytest.approx(gains[0], rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_on_the_host_are_trained_in_the_same_way(dtype: torch.dtype, batch: RolloutBatch) -> None:
    on_host, plain = (
        make_actor(dtype, ppo_mini_batches=2, optimizer_on_host=is_on_host) for is_on_host in (True, False)
    )
    metrics = [train(actor, batch, num_updates=2) for actor in (on_host, plain)]
    for found, expected in zip(*metrics, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    weights = dict(plain.weights())
    for name, value in on_host.weights():
        torch.testing.assert_close(value, weights[name], atol=1e-4, rtol=1e-2)
    assert all(parameter.grad is None for parameter in on_host.model.parameters())


def test_steps_too_small_for_bfloat16_add_up(batch: RolloutBatch) -> None:
    """A weight of 1 changes by 1e-4 per step, which is below the precision of bfloat16."""
    actor = make_actor(torch.bfloat16, lr=1e-4)
    train(actor, batch, num_updates=1)
    after_one = dict(actor.weights())["model.norm.weight"].clone()
    train(actor, batch, num_updates=60)
    assert torch.equal(after_one, torch.ones_like(after_one))
    assert not torch.equal(dict(actor.weights())["model.norm.weight"], after_one)


def test_an_unsupported_training_dtype_is_refused(tmp_path: Path) -> None:
    tiny_policy().half().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.dtype is auto, but .* has torch\.float16"):
        compute_dtype(ModelConfig(path=str(tmp_path), dtype="auto"))


SIZE = 8192


def make_optimizer(weight: torch.nn.Parameter, *, bits: int) -> Optimizer:
    config = ActorConfig(lr=1e-2, optimizer_bits=bits)
    return Optimizer(MasterWeights({"weight": weight}, {}), config=config, seed=0)


def optimized(bits: int) -> tuple[Optimizer, Tensor]:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(SIZE))
    optimizer = make_optimizer(weight, bits=bits)
    take_steps(optimizer, weight, num_steps=20)
    return optimizer, weight


def take_steps(optimizer: Optimizer, weight: Tensor, *, num_steps: int) -> None:
    """Take steps towards 0."""
    for _ in range(num_steps):
        optimizer.start_update()
        weight.grad = weight.detach() / SIZE
        optimizer.step(loss=1.0)
        optimizer.end_update()


def num_bytes(optimizer: Optimizer) -> int:
    state = optimizer.state_dict()["adamw"]["weight"]
    return sum(value.numel() * value.itemsize for value in state.values() if isinstance(value, Tensor))


def test_a_state_of_8_bits_follows_one_of_32() -> None:
    (exact, expected), (quantised, found) = optimized(32), optimized(8)
    torch.manual_seed(0)
    moved_by = (expected.detach() - torch.randn(SIZE)).abs().mean()
    assert float((found - expected).detach().abs().mean()) < 0.05 * float(moved_by)
    assert num_bytes(quantised) < 0.3 * num_bytes(exact)


@pytest.mark.parametrize("bits", [8, 32])
def test_an_optimizer_resumes_exactly_from_a_saved_state(bits: int) -> None:
    first, weight = optimized(bits)
    other_weight = torch.nn.Parameter(weight.detach().clone())
    second = make_optimizer(other_weight, bits=bits)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    take_steps(first, weight, num_steps=3)
    take_steps(second, other_weight, num_steps=3)
    assert torch.equal(weight, other_weight)
