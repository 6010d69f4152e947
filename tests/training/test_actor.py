"""The actor learns from sampled tokens of kept rows only, and reports what it did in its metrics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor
from transformers import Qwen3ForCausalLM

from agent_loop.config import ActorConfig, CorrectionConfig
from agent_loop.errors import DataError
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training import metrics as names
from agent_loop.training.actor import Actor
from agent_loop.training.actor_loss import PastLogProbs, importance
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import FORCED
from tests.training.fakes import PAD, advantages_of, sample_trajectories, sampled_batch, tiny_policy


def make_actor(model: Qwen3ForCausalLM | None = None, *, temperature: float = 1.0, **settings: Any) -> Actor:
    config = ActorConfig(**{"lr": 1e-3, **settings})
    reference = tiny_policy() if config.kl_loss_coef else None
    return Actor(model or tiny_policy(), config=config, temperature=temperature, reference=reference)


def make_batch(**options: Any) -> tuple[RolloutBatch, Tensor]:
    """Return a batch with its advantages [B, 1]."""
    batch = sampled_batch(**options)
    return batch, advantages_of(batch)


def parameters(actor: Actor) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in actor.weights()}


def gradients(actor: Actor, batch: RolloutBatch, advantages_BR: Tensor) -> Tensor:
    """Return the gradients of one update, taken before the optimiser clears them."""
    caught: list[Tensor] = []
    for parameter in actor.model.parameters():
        parameter.grad = None
    step = actor.optimizer._adamw.register_step_pre_hook(  # pyright: ignore[reportPrivateUsage]
        lambda *_: caught.extend(
            p.grad.clone().flatten() for p in actor.model.parameters() if p.grad is not None
        )
    )
    actor.update(batch, advantages_BR=advantages_BR)
    step.remove()
    return torch.cat(caught)


def test_logprobs_equal_those_of_the_rollout() -> None:
    batch, _ = make_batch()
    logprobs_BR = make_actor(max_tokens_per_micro_batch=50).logprobs(batch)
    mask_BR = batch["response_mask"].bool()
    torch.testing.assert_close(logprobs_BR[mask_BR], batch["rollout_log_probs"][mask_BR], atol=1e-5, rtol=0)
    width = batch["prompts"].shape[1]
    assert (logprobs_BR[~batch["attention_mask"][:, width:].bool()] == 0).all()


def test_greedy_rollouts_are_compared_at_temperature_one() -> None:
    batch, _ = make_batch()
    assert torch.equal(make_actor(temperature=0.0).logprobs(batch), make_actor().logprobs(batch))
    assert not torch.equal(make_actor(temperature=0.5).logprobs(batch), make_actor().logprobs(batch))


LOSSES: dict[str, dict[str, Any]] = {
    "token-mean": {"kl_loss_coef": 0.1, "entropy_coeff": 0.01},
    "seq-mean-token-mean": {
        "loss_agg_mode": "seq-mean-token-mean",
        "kl_loss_coef": 0.1,
        "kl_loss_type": "k2",
    },
    "dr-grpo": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_length": 20, "entropy_coeff": 0.01},
    "gspo": {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean", "clip_ratio_low": 0.01},
    "cispo": {"policy_loss": "cispo", "kl_loss_coef": 0.1},
    "dppo": {"policy_loss": "dppo", "dppo_threshold": 0.01, "clip_ratio_c": 1.1},
    "sapo": {"policy_loss": "sapo", "loss_agg_mode": "seq-mean-token-mean", "tau_neg": 2.0},
    "dual-clip": {"clip_ratio_c": 1.1, "kl_loss_coef": 0.1, "kl_loss_type": "k1"},
    "truncate": {"old_log_probs": "recompute", "correction": {"kind": "truncate", "max_ratio": 1.1}},
    "mask": {
        "old_log_probs": "recompute",
        "correction": {"kind": "mask", "level": "sequence", "min_ratio": 0.8, "max_ratio": 1.5},
    },
    "geometric-mask": {
        "old_log_probs": "recompute",
        "correction": {"kind": "mask", "level": "geometric", "min_ratio": 0.9, "max_ratio": 1.1},
    },
}


def off_policy_batch() -> tuple[RolloutBatch, Tensor]:
    """Return a batch whose importance ratios are not 1, with a different advantage [B, R] for each token."""
    batch, _ = make_batch()
    generator = torch.Generator().manual_seed(1)
    batch["rollout_log_probs"] += 0.2 * torch.randn(batch["responses"].shape, generator=generator)
    return batch, torch.randn(batch["responses"].shape, generator=generator)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("name", LOSSES)
def test_splitting_and_packing_change_no_gradient(name: str) -> None:
    batch, advantages_BR = off_policy_batch()
    splits: list[dict[str, Any]] = [
        {"max_tokens_per_micro_batch": 100_000},
        {"max_tokens_per_micro_batch": 30},
        {"max_tokens_per_micro_batch": 1},
        {"max_tokens_per_micro_batch": 100_000, "share_prefixes": False},
        {"max_tokens_per_micro_batch": 40, "share_prefixes": False},
    ]
    whole, *others = (
        gradients(
            make_actor(tiny_policy(seed=2).double(), grad_clip=1e9, **LOSSES[name], **split),
            batch,
            advantages_BR,
        )
        for split in splits
    )
    assert float(whole.norm()) > 0
    for other in others:
        assert float((whole - other).norm() / whole.norm()) < 1e-6


def test_dropped_rows_and_tool_tokens_have_no_effect_on_the_weights() -> None:
    batch, advantages_BR = make_batch()
    keep_B = batch["group"] != 2
    changed = batch.clone()
    is_tool_BR = (batch["response_mask"] == 0) | ~keep_B[:, None]
    changed["rollout_log_probs"][is_tool_BR] = math.nan
    first, second = make_actor(), make_actor()
    first.update(batch, advantages_BR=advantages_BR, keep_B=keep_B)
    metrics = second.update(
        changed, advantages_BR=torch.where(keep_B[:, None], advantages_BR, math.nan), keep_B=keep_B
    )
    assert metrics[names.ROWS_TRAINED] == 18
    for name, value in first.weights():
        assert torch.equal(value, parameters(second)[name])


def test_an_update_without_rows_or_with_an_infinite_gradient_changes_no_weight() -> None:
    batch, advantages_BR = make_batch()
    actor = make_actor(ppo_mini_batches=2, ppo_epochs=2)
    before = parameters(actor)
    nothing = actor.update(
        batch, advantages_BR=advantages_BR, keep_B=torch.zeros(len(batch), dtype=torch.bool)
    )
    infinite = actor.update(batch, advantages_BR=advantages_BR * math.inf)
    assert nothing == {names.SKIPPED_UPDATE: 1.0, names.ROWS_TRAINED: 0.0}
    assert (infinite[names.NONFINITE_UPDATES], infinite[names.OPTIMIZER_STEPS]) == (4, 0)
    assert all(torch.equal(value, before[name]) for name, value in actor.weights())


def test_the_first_mini_batch_measures_the_mismatch_of_engine_and_trainer() -> None:
    batch, advantages_BR = make_batch()
    agreeing = make_actor(ppo_mini_batches=4, lr=0.1).update(batch, advantages_BR=advantages_BR)
    batch["rollout_log_probs"] += 0.25
    shifted = make_actor(ppo_mini_batches=4, lr=0.1).update(batch, advantages_BR=advantages_BR)
    assert agreeing[names.LOGPROB_DIFF_MAX] < 1e-5
    assert shifted[names.LOGPROB_DIFF_MEAN] == pytest.approx(0.25, abs=1e-4)


def test_missing_rollout_logprobs_are_computed_first_or_refused_if_a_correction_needs_them() -> None:
    batch, advantages_BR = make_batch()
    bare, _ = make_batch(has_logprobs=False)
    first, second = make_actor(), make_actor()
    first.update(batch, advantages_BR=advantages_BR)
    metrics = second.update(bare, advantages_BR=advantages_BR)
    assert names.LOGPROB_DIFF_MAX not in metrics
    assert metrics[names.PPO_KL] == pytest.approx(0, abs=1e-6)
    for name, value in first.weights():
        torch.testing.assert_close(value, parameters(second)[name], atol=1e-5, rtol=0)
    with pytest.raises(DataError, match=r"no rollout_log_probs, which actor\.correction compares with"):
        make_actor(**LOSSES["truncate"]).update(bare, advantages_BR=advantages_BR)


def test_a_reference_is_needed_for_the_kl_penalty_and_is_never_trained() -> None:
    batch, advantages_BR = make_batch()
    reference = tiny_policy()
    actor = Actor(tiny_policy(), config=ActorConfig(lr=1e-2, kl_loss_coef=1.0), reference=reference)
    first, second = (actor.update(batch, advantages_BR=advantages_BR) for _ in range(2))
    assert first[names.KL_LOSS] == pytest.approx(0, abs=1e-6)
    assert second[names.KL_LOSS] > 1e-4
    original = dict(tiny_policy().named_parameters())
    assert all(torch.equal(value, original[name]) for name, value in reference.named_parameters())
    with pytest.raises(ValueError, match="needs a reference model"):
        Actor(tiny_policy(), config=ActorConfig(kl_loss_coef=1.0))


def test_the_learning_rate_decays_linearly_to_its_minimum() -> None:
    batch, advantages_BR = make_batch()
    actor = make_actor(lr=1.0e-3, warmup_steps=2, decay_steps=4, min_lr_share=0.2)
    rates = [actor.update(batch, advantages_BR=advantages_BR)[names.LEARNING_RATE] for _ in range(6)]
    assert rates == pytest.approx([0.5e-3, 0.8e-3, 0.6e-3, 0.4e-3, 0.2e-3, 0.2e-3])


def test_old_logprobs_come_from_the_rollout_unless_they_are_recomputed() -> None:
    batch, advantages_BR = off_policy_batch()
    given = make_actor().update(batch, advantages_BR=advantages_BR)
    computed = make_actor(old_log_probs="recompute").update(batch, advantages_BR=advantages_BR)
    assert given[names.CLIP_FRACTION] > 0
    assert computed[names.CLIP_FRACTION] == 0
    assert computed[names.PPO_KL] == pytest.approx(0, abs=1e-6)
    assert computed[names.MISMATCH_K3] == pytest.approx(given[names.MISMATCH_K3])
    assert 0 < given[names.MISMATCH_K3] < 0.1


def test_the_branches_of_a_rollout_are_in_one_mini_batch() -> None:
    optimizer = make_actor(ppo_mini_batches=3, ppo_epochs=2).optimizer
    rows = torch.tensor([0, 1, 2, 4, 5, 6, 7, 9])
    rollouts_B = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 4, 4])
    found = [part.tolist() for part in optimizer.mini_batches(rows, rollouts_B=rollouts_B)]
    assert len(found) == 6
    for epoch in (found[:3], found[3:]):
        assert sorted(row for part in epoch for row in part) == rows.tolist()
        of_parts = [{int(rollouts_B[row]) for row in part} for part in epoch]
        assert sum(map(len, of_parts)) == len(set().union(*of_parts)) == 5


@pytest.mark.parametrize("trained", [[0, 1, 2], [0, 1]])
def test_the_trained_branches_of_a_rollout_are_weighed_together(trained: list[int]) -> None:
    """The rows 1 and 2 are branches of the second rollout."""
    first, *others = sample_trajectories(tiny_policy(), num_groups=1, n=3)
    branches = [structs.replace(each, rollout=1, branch=branch) for branch, each in enumerate(others)]
    batch = assemble([first, *branches], pad_token_id=PAD)
    mask_BR = batch["response_mask"].bool()
    shift_B1 = torch.tensor([[0.0], [0.1], [-0.3]])
    rollout_BR = batch["rollout_log_probs"]
    past = PastLogProbs(old_BR=rollout_BR + shift_B1, rollout_BR=rollout_BR, reference_BR=None)
    config = CorrectionConfig(kind="truncate", level="geometric", max_ratio=1e6)
    weights_BR, metrics = importance(batch, rows=torch.tensor(trained), past=past, config=config)
    assert weights_BR is not None
    own = trained[1:]
    num_tokens = int(mask_BR[own].sum())
    mean = float((shift_B1 * mask_BR)[own].sum()) / num_tokens
    torch.testing.assert_close(weights_BR[0], mask_BR[0].float())
    assert weights_BR[own][mask_BR[own]].tolist() == pytest.approx([math.exp(mean)] * num_tokens)
    assert not weights_BR[[row for row in range(3) if row not in trained]].any()
    assert metrics[names.MASKED_SHARE] == metrics[names.TRUNCATED_SHARE] == 0


COEFFICIENT = 0.5


def observe(batch: RolloutBatch, *, advantage: float = 0.0, **config: Any) -> dict[str, float]:
    """Return the metrics of one update with the loss on observations."""
    actor = make_actor(**{"observation_coeff": COEFFICIENT, **config})
    return actor.update(batch, advantages_BR=torch.full(batch["responses"].shape, advantage))


def reference_loss(batch: RolloutBatch) -> float:
    """Return the mean cross-entropy of the observations, row by row from plain forward passes."""
    model, width, values = tiny_policy(), batch["prompts"].shape[1], []
    for row in range(len(batch)):
        is_token = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][is_token]
        num_prompt = int(is_token[:width].sum())
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
        versions = batch["weight_versions"][row][is_token[width:]]
        values += [
            -float(logprobs[place - 1, ids[place]])
            for place in range(num_prompt, len(ids))
            if versions[place - num_prompt] < 0
        ]
    return float(np.mean(values))


@pytest.mark.parametrize("config", [{}, {"share_prefixes": False}])
def test_the_loss_on_observations_is_the_mean_over_observations_alone(config: dict[str, Any]) -> None:
    batch = sampled_batch()
    metrics = observe(batch, **config)
    assert metrics[names.OBSERVATION_LOSS] == pytest.approx(reference_loss(batch), abs=1e-5)
    assert metrics[names.LOSS] == pytest.approx(COEFFICIENT * metrics[names.OBSERVATION_LOSS], abs=1e-6)


def test_the_policy_loss_and_the_stored_log_probs_are_those_without_a_loss_on_observations() -> None:
    with_loss, without = sampled_batch(), sampled_batch()
    metrics = observe(with_loss, advantage=1.0)
    plain = observe(without, advantage=1.0, observation_coeff=0.0)
    assert names.OBSERVATION_LOSS not in plain
    assert metrics[names.ENTROPY] == pytest.approx(plain[names.ENTROPY], abs=1e-6)
    assert metrics[names.PPO_KL] == pytest.approx(plain[names.PPO_KL], abs=1e-6)
    torch.testing.assert_close(with_loss["train_logprobs"], without["train_logprobs"], equal_nan=True)


def test_forced_tokens_are_no_observations() -> None:
    [trajectory] = sample_trajectories(tiny_policy(), num_groups=1, n=1)
    prompt, first, *rest = trajectory.output.segments
    forced = structs.replace(first, extras={FORCED: np.ones(len(first), np.uint8)})
    output = AgentLoopOutput(segments=[prompt, forced, *rest])
    batch = assemble([structs.replace(trajectory, output=output), trajectory], pad_token_id=PAD)
    assert observe(batch)[names.OBSERVATION_LOSS] == pytest.approx(reference_loss(batch), abs=1e-5)
