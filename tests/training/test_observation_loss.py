"""The auxiliary loss on observations: its value and gradient, on exactly the tokens that no model sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from agent_loop.config import ActorConfig
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training import metrics as names
from agent_loop.training.actor import Actor
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import FORCED, Origin
from tests.training.fakes import PAD, sample_trajectories, tiny_policy

COEFFICIENT = 0.5


def batch_of(**options: Any) -> RolloutBatch:
    return assemble(sample_trajectories(tiny_policy(), **options), pad_token_id=PAD)


def gradients(batch: RolloutBatch, *, advantage: float = 0.0, **config: Any) -> tuple[dict[str, Any], Any]:
    """Return the metrics and the change of the weights of one optimiser step."""
    model = tiny_policy()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    settings = ActorConfig(**{"lr": 1e-3, "observation_coeff": COEFFICIENT, **config})
    actor = Actor(model, config=settings)
    metrics = actor.update(batch, advantages_BR=torch.full(batch["responses"].shape, advantage))
    return metrics, {name: weight - before[name] for name, weight in model.state_dict().items()}


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
def test_the_loss_is_the_mean_over_observations_alone(config: dict[str, Any]) -> None:
    batch = batch_of()

    metrics, _ = gradients(batch, **config)

    assert metrics[names.OBSERVATION_LOSS] == pytest.approx(reference_loss(batch), abs=1e-5)
    assert metrics[names.LOSS] == pytest.approx(COEFFICIENT * metrics[names.OBSERVATION_LOSS], abs=1e-6)


def test_the_policy_loss_and_the_stored_log_probs_are_those_without_it() -> None:
    with_loss, without = batch_of(), batch_of()

    metrics, _ = gradients(with_loss, advantage=1.0)
    plain, _ = gradients(without, advantage=1.0, observation_coeff=0.0)

    assert names.OBSERVATION_LOSS not in plain
    assert metrics[names.ENTROPY] == pytest.approx(plain[names.ENTROPY], abs=1e-6)
    assert metrics[names.PPO_KL] == pytest.approx(plain[names.PPO_KL], abs=1e-6)
    torch.testing.assert_close(with_loss["train_logprobs"], without["train_logprobs"], equal_nan=True)


def test_forced_tokens_are_no_observations() -> None:
    [trajectory] = sample_trajectories(tiny_policy(), num_groups=1, n=1)
    segments = [
        structs.replace(s, extras={FORCED: np.ones(len(s), np.uint8)})
        if s.origin is Origin.MODEL and number == 1
        else s
        for number, s in enumerate(trajectory.output.segments)
    ]
    forced = structs.replace(trajectory, output=AgentLoopOutput(segments=segments))
    batch = assemble([forced, trajectory], pad_token_id=PAD)

    metrics, _ = gradients(batch)

    assert metrics[names.OBSERVATION_LOSS] == pytest.approx(reference_loss(batch), abs=1e-5)
