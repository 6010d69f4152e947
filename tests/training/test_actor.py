"""The actor learns from sampled tokens of kept rows only, and reports what it did in its metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor
from transformers import Qwen3ForCausalLM

from agent_loop.config import ActorConfig
from agent_loop.errors import DataError
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training import metrics as names
from agent_loop.training.actor import Actor
from agent_loop.training.advantages.groups import grpo_advantages
from agent_loop.trajectory import AgentLoopOutput, Segment
from agent_loop.types import Origin, as_token_ids
from tests.training.fakes import PAD, sample_trajectories, tiny_policy


def make_actor(model: Qwen3ForCausalLM | None = None, *, temperature: float = 1.0, **settings: Any) -> Actor:
    config = ActorConfig(**{"lr": 1e-3, **settings})
    reference = tiny_policy() if config.kl_loss_coef else None
    return Actor(model or tiny_policy(), config=config, temperature=temperature, reference=reference)


def make_batch(**options: Any) -> tuple[RolloutBatch, Tensor]:
    """Return a batch with its advantages [B, 1]."""
    batch = assemble(sample_trajectories(tiny_policy(), **options), pad_token_id=PAD)
    return batch, grpo_advantages(batch["reward"], groups_B=batch["group"])[:, None]


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


def test_without_rows_the_weights_are_unchanged_and_a_metric_reports_it() -> None:
    batch, advantages_BR = make_batch()
    actor = make_actor()
    before = parameters(actor)

    metrics = actor.update(
        batch, advantages_BR=advantages_BR, keep_B=torch.zeros(len(batch), dtype=torch.bool)
    )

    assert metrics == {names.SKIPPED_UPDATE: 1.0, names.ROWS_TRAINED: 0.0}
    assert all(torch.equal(value, before[name]) for name, value in actor.weights())


def test_an_infinite_gradient_is_counted_and_changes_no_weight() -> None:
    batch, advantages_BR = make_batch()
    actor = make_actor(ppo_mini_batches=2, ppo_epochs=2)
    before = parameters(actor)

    metrics = actor.update(batch, advantages_BR=advantages_BR * math.inf)

    assert metrics[names.NONFINITE_UPDATES] == 4
    assert metrics[names.OPTIMIZER_STEPS] == 0
    assert all(torch.equal(value, before[name]) for name, value in actor.weights())


def test_the_first_mini_batch_measures_the_mismatch_of_engine_and_trainer() -> None:
    batch, advantages_BR = make_batch()
    agreeing = make_actor(ppo_mini_batches=4, lr=0.1).update(batch, advantages_BR=advantages_BR)
    batch["rollout_log_probs"] += 0.25
    shifted = make_actor(ppo_mini_batches=4, lr=0.1).update(batch, advantages_BR=advantages_BR)

    assert agreeing[names.LOGPROB_DIFF_MAX] < 1e-5
    assert shifted[names.LOGPROB_DIFF_MEAN] == pytest.approx(0.25, abs=1e-4)


def test_missing_rollout_logprobs_are_computed_first() -> None:
    batch, advantages_BR = make_batch()
    bare, _ = make_batch(has_logprobs=False)
    assert "rollout_log_probs" not in bare

    first, second = make_actor(), make_actor()
    first.update(batch, advantages_BR=advantages_BR)
    metrics = second.update(bare, advantages_BR=advantages_BR)

    assert names.LOGPROB_DIFF_MAX not in metrics
    assert metrics[names.PPO_KL] == pytest.approx(0, abs=1e-6)
    for name, value in first.weights():
        torch.testing.assert_close(value, parameters(second)[name], atol=1e-5, rtol=0)


def test_a_reference_is_needed_for_the_kl_penalty_and_is_never_trained() -> None:
    batch, advantages_BR = make_batch()
    reference = tiny_policy()
    actor = Actor(tiny_policy(), config=ActorConfig(lr=1e-2, kl_loss_coef=1.0), reference=reference)

    first = actor.update(batch, advantages_BR=advantages_BR)
    second = actor.update(batch, advantages_BR=advantages_BR)

    assert first[names.KL_LOSS] == pytest.approx(0, abs=1e-6)
    assert second[names.KL_LOSS] > 1e-4
    for (_, kept), (_, original) in zip(
        reference.named_parameters(), tiny_policy().named_parameters(), strict=True
    ):
        assert torch.equal(kept, original)
    with pytest.raises(ValueError, match="needs a reference model"):
        Actor(tiny_policy(), config=ActorConfig(kl_loss_coef=1.0))


def test_the_learning_rate_decays_linearly_to_its_minimum() -> None:
    batch, advantages_BR = make_batch()
    actor = make_actor(lr=1.0e-3, warmup_steps=2, decay_steps=4, min_lr_share=0.2)

    rates = [actor.update(batch, advantages_BR=advantages_BR)[names.LEARNING_RATE] for _ in range(6)]

    assert rates == pytest.approx([0.5e-3, 0.8e-3, 0.6e-3, 0.4e-3, 0.2e-3, 0.2e-3])


def test_an_empty_prompt_is_refused_by_name() -> None:
    trajectories = sample_trajectories(tiny_policy(), num_groups=1, n=2)
    segments = [Segment(as_token_ids([]), Origin.PROMPT), *trajectories[1].output.response_segments]
    bad = structs.replace(trajectories[1], output=AgentLoopOutput(segments=segments))
    batch = assemble([trajectories[0], bad], pad_token_id=PAD)

    with pytest.raises(DataError, match="group=0/rollout=1 has an empty prompt"):
        make_actor().update(batch, advantages_BR=torch.ones(2, 1))


def test_old_logprobs_come_from_the_rollout_unless_they_are_recomputed() -> None:
    batch, advantages_BR = off_policy_batch()

    given = make_actor().update(batch, advantages_BR=advantages_BR)
    computed = make_actor(old_log_probs="recompute").update(batch, advantages_BR=advantages_BR)

    assert given[names.CLIP_FRACTION] > 0
    assert computed[names.CLIP_FRACTION] == 0
    assert computed[names.PPO_KL] == pytest.approx(0, abs=1e-6)
    assert computed[names.MISMATCH_K3] == pytest.approx(given[names.MISMATCH_K3])
    assert 0 < given[names.MISMATCH_K3] < 0.1


def test_a_correction_without_logprobs_of_the_servers_is_refused() -> None:
    bare, advantages_BR = make_batch(has_logprobs=False)

    with pytest.raises(DataError, match=r"no rollout_log_probs, which actor\.correction compares with"):
        make_actor(**LOSSES["truncate"]).update(bare, advantages_BR=advantages_BR)
