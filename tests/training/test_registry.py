"""Estimators and losses of users, selected by name and by `file.py:name`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_loop.config import ActorConfig, AlgorithmConfig, Config
from agent_loop.errors import AlgorithmError, ConfigError
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import Advantages, Rewards, TokenLoss, advantage_estimator, policy_loss
from agent_loop.training.actor import Actor
from agent_loop.training.advantages.estimate import estimate_advantages, estimator_needs, load_estimator
from agent_loop.training.advantages.rewards import collect_rewards
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.registry import ESTIMATORS, POLICY_LOSSES
from tests.training.fakes import FakeRollouts, sampled_batch, tiny_policy


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    return sampled_batch(num_groups=2, n=3)


@pytest.fixture(autouse=True)
def registrations_of_this_test() -> Iterator[None]:
    stores: list[dict[Any, Any]] = [
        store
        for registry in (ESTIMATORS, POLICY_LOSSES)
        for store in (registry._functions, registry._options)  # pyright: ignore[reportPrivateUsage]
    ]
    before = [dict(store) for store in stores]
    yield
    for store, entries in zip(stores, before, strict=True):
        store.clear()
        store.update(entries)


def estimate(batch: RolloutBatch, name: str, **inputs: Tensor) -> Tensor:
    config = AlgorithmConfig(adv_estimator=name)
    rewards = collect_rewards(batch, config=config, response_length=9)
    return estimate_advantages(rewards, estimator=load_estimator(config), **inputs).advantages_BR


def update(batch: RolloutBatch, name: str) -> dict[str, float]:
    actor = Actor(tiny_policy(), config=ActorConfig(lr=1e-3, policy_loss=name))
    return actor.update(batch, advantages_BR=torch.linspace(-1, 1, len(batch))[:, None])


def test_an_estimator_and_the_same_function_in_a_file_agree(batch: RolloutBatch, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from agent_loop import advantage_estimator\n"
        "@advantage_estimator('centred_by_batch')\n"
        "def centred(rewards, *, config):\n"
        "    return rewards.per_row() - rewards.per_row().mean()\n"
    )
    from_file = estimate(batch, f"{file}:centred")
    assert torch.equal(estimate(batch, "centred_by_batch"), from_file)
    assert from_file.shape == batch["responses"].shape
    assert from_file[:, 0] == pytest.approx((batch["reward"] - batch["reward"].mean()).float())


def test_a_class_is_constructed_and_gets_the_inputs_that_its_decorator_declares(batch: RolloutBatch) -> None:
    @advantage_estimator(
        "with_everything", compares_in_group=True, needs_critic=True, needs_greedy_rollouts=True
    )
    class Everything:  # pyright: ignore[reportUnusedClass]
        def __init__(self) -> None:
            self.factor = 2.0

        def __call__(
            self, rewards: Rewards, *, config: AlgorithmConfig, values_BR: Tensor, baselines_B: Tensor
        ) -> Advantages:
            return Advantages(self.factor * rewards.per_row() - baselines_B, returns_BR=values_BR + 1)

    needs = estimator_needs("with_everything")
    assert (needs.groups, needs.critic, needs.greedy_rollouts) == (True, True, True)
    zeros_BR, baselines_B = torch.zeros(batch["responses"].shape), torch.ones(len(batch))
    found = estimate(batch, "with_everything", values_BR=zeros_BR, baselines_B=baselines_B)
    assert found[:, 0] == pytest.approx(2 * batch["reward"] - 1)


def raises(*args: Any, **_: Any) -> Tensor:
    raise ValueError("no rewards today")


def returning(value: Any) -> Any:
    return lambda rewards, *, config: value


@pytest.mark.parametrize(
    ("estimator", "complaint"),
    [
        (returning(None), " returned None as advantages; return a tensor of shape"),
        (returning(torch.zeros(2)), r" returned advantages of shape \[2\]; return a .* \[6\] or \[6, "),
        (returning(torch.full((6,), torch.nan)), " returned nan as the advantage of row 0, token 0"),
        (returning(torch.full((6,), torch.inf)), " returned inf as the advantage"),
        (returning(Advantages(torch.zeros(6), has_signal_B=torch.ones(2))), r" returned has_signal_B of .*2"),
        (raises, r" raised ValueError: no rewards today \(.*test_registry\.py, line"),
    ],
)
def test_a_bad_estimate_is_a_named_error(batch: RolloutBatch, estimator: Any, complaint: str) -> None:
    advantage_estimator("mine")(estimator)
    with pytest.raises(AlgorithmError, match=rf"algorithm\.adv_estimator=mine{complaint}"):
        estimate(batch, "mine")


def start(**sections: dict[str, Any]) -> None:
    config = Config.model_validate(sections)
    PPOTrainer(config, manager=FakeRollouts()).fit().send(None)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def f(rewards): ...", r"has the signature f\(rewards\).*define it as f\(rewards, \*, config\)"),
        ("def f(rewards, *, config, more): ...", "missing a required argument: 'more'"),
        ("f = 3", "an object of type int; name a function"),
        ("g = 3", "has no 'f'"),
        ("class f:\n    def __init__(self): 1 / 0", "constructing f raised ZeroDivisionError"),
    ],
)
def test_an_estimator_that_cannot_be_called_is_refused(tmp_path: Path, source: str, complaint: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=rf"(?s)algorithm\.adv_estimator.*{complaint}"):
        start(algorithm={"adv_estimator": f"{file}:f"})


@pytest.mark.parametrize(
    ("section", "key", "complaint"),
    [
        ("algorithm", "adv_estimator", "unknown advantage estimator; did you mean 'gae'"),
        ("actor", "policy_loss", "unknown policy loss; there are: .*gspo.*ppo"),
    ],
)
def test_an_unknown_name_is_refused_with_the_names_that_exist(section: str, key: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key} is 'gea': {complaint}"):
        start(**{section: {key: "gea"}})


LOSSES = """
from agent_loop.training import TokenLoss, masked_difference, policy_loss

@policy_loss("reinforce")
def reinforce(logprobs_BT, *, old_logprobs_BT, advantages_BT, mask_BT, config):
    ratio_BT = masked_difference(logprobs_BT, old_logprobs_BT, mask_BT=mask_BT).exp()
    return TokenLoss(-ratio_BT * advantages_BT, {"ratio": ratio_BT})
"""


def test_a_loss_from_a_file_trains_and_logs_its_metrics(batch: RolloutBatch, tmp_path: Path) -> None:
    file = tmp_path / "losses.py"
    file.write_text(LOSSES)
    metrics = update(batch, f"{file}:reinforce")
    assert metrics["actor/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/loss"] == pytest.approx(update(batch, "ppo")["actor/loss"], abs=1e-5)
    assert update(batch, "reinforce") == metrics


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (lambda x_BT, **_: x_BT.mean(), r"returned a loss of shape \[\]; return a tensor of shape"),
        (lambda x_BT, **_: 0.0, "returned 0.0 .* as a loss"),
        (lambda x_BT, **_: x_BT * torch.nan, "returned a loss that is not finite at"),
        (lambda x_BT, **_: torch.zeros_like(x_BT), "returned a loss without a gradient"),
        (lambda x_BT, **_: TokenLoss(x_BT, {"loss": x_BT}), "returned the metric 'loss', which the actor"),
        (lambda x_BT, **_: x_BT[7, 7, 7], "raised IndexError"),
    ],
)
def test_a_bad_result_of_a_loss_is_a_named_error(batch: RolloutBatch, loss: Any, complaint: str) -> None:
    policy_loss("mine")(loss)
    with pytest.raises(AlgorithmError, match=rf"actor\.policy_loss=mine {complaint}"):
        update(batch, "mine")
