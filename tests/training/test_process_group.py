"""Training in two processes has the same results as in one process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from agent_loop.config import Config
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training import metrics as names
from agent_loop.training.checkpoint import open_checkpoint, save_checkpoint
from agent_loop.training.learner import load_learner
from agent_loop.training.ranks import start_process_group
from agent_loop.trajectory import AgentLoopOutput, Feedback, Trajectory
from agent_loop.types import Origin
from agent_loop.weights.adapted import AdaptedWeights
from tests.training import runs
from tests.training.fakes import PAD, sample_trajectories, tiny_policy, tiny_tokenizer
from tests.training.runs import changed, lines_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_UPDATES = 8
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "grpo": {"actor": {"ppo_mini_batches": 2, "kl_loss_coef": 0.1, "max_tokens_per_micro_batch": 60}},
    "gae": {
        "algorithm": {"adv_estimator": "gae"},
        "actor": {"gradient_checkpointing": True, "old_log_probs": "recompute"},
    },
    "tree": {"actor": {"gradient_checkpointing": True, "max_tokens_per_micro_batch": 60}},
    "sources": {
        "algorithm": {
            "turn_reward_weight": 0.5,
            "by_data_source": {
                "a": {"adv_estimator": "gdpo", "reward_parts": {"reward": 1, "part": 0.5}},
                "b": {"adv_estimator": "gigpo", "anchor_state": "state"},
            },
        },
        "rollout": {"n": 6},
    },
    "lora": {"model": {"lora_rank": 4}, "actor": {"kl_loss_coef": 0.1}},
}
TOLERANCE = 1e-5


def settings(folder: Path, case: str, *, num_processes: int) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "device": "cpu"},
        "actor": {"lr": 1e-3, "warmup_steps": 3},
        "critic": {"lr": 1e-3},
        "trainer": {"num_processes": num_processes},
    }
    for section, values in CASES[case].items():
        sections[section] = sections.get(section, {}) | values
    return Config.model_validate(sections)


@dataclass(frozen=True, slots=True)
class Outcome:
    metrics: list[dict[str, float]]
    """Metrics of each update."""
    weights: dict[str, Tensor]
    checkpoint: Path
    """Checkpoint after half of the updates."""
    base_ids: list[str]
    """Base ids of the published weights, if the model has adapters."""


@cache
def batch_of(update: int) -> RolloutBatch:
    trajectories = sample_trajectories(tiny_policy(), seed=update)
    return assemble([with_fields(trajectory) for trajectory in trajectories], pad_token_id=PAD)


def with_fields(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory of a game, with a data source, a part of the reward, and feedback on its first turn."""
    segments, rollout = trajectory.output.segments, trajectory.rollout
    place = len(segments[1]) - 1
    feedback = Feedback(Origin.TOOL, place=place, reward=rollout / 5, extra={"state": rollout % 2})
    return structs.replace(
        trajectory,
        output=AgentLoopOutput(segments=segments, feedback=[feedback], extra_fields={"seat": rollout % 2}),
        row={**trajectory.row, "data_source": ["a", "b", None][trajectory.group % 3]},
        reward_extra={"part": rollout % 3},
    )


async def train(config: Config, run_dir: Path, *, resume_from: Path | None = None) -> Outcome:
    """Run the updates, each on another batch, with a checkpoint after half of them; or resume from a checkpoint."""
    middle = NUM_UPDATES // 2
    metrics: list[dict[str, float]] = []
    checkpoint = resume_from
    async with start_process_group(config) as process_group:
        learner = load_learner(
            config, checkpoint=resume_from and open_checkpoint(resume_from), process_group=process_group
        )
        for number in range(middle if resume_from else 0, NUM_UPDATES):
            if number == middle and checkpoint is None:
                checkpoint = save_checkpoint(
                    run_dir, step=number, learner=learner, tokenizer=tiny_tokenizer(), config={}, keep=1
                )
            metrics.append(learner.learn(batch_of(number)))
        next(iter(learner.weights()))  # A reader that stops early.
        published = [learner.weights() for _ in range(2)]
        weights = {name: value.clone() for name, value in published[-1]}
    assert checkpoint is not None
    base_ids = [each.base_id for each in published if isinstance(each, AdaptedWeights)]
    return Outcome(metrics, weights, checkpoint, base_ids)


def assert_same(ours: Outcome, expected: Outcome) -> None:
    for one, other in zip(reversed(ours.metrics), reversed(expected.metrics), strict=False):
        assert one == pytest.approx(other, abs=TOLERANCE, rel=TOLERANCE)
    assert ours.weights.keys() == expected.weights.keys()
    for name, value in ours.weights.items():
        torch.testing.assert_close(value, expected.weights[name], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_match_one_and_checkpoints_can_be_exchanged(
    policy_folder: Path, tmp_path: Path, case: str
) -> None:
    one, two = (settings(policy_folder, case, num_processes=number) for number in (1, 2))

    def run(config: Config, name: str, resume_from: Path | None = None) -> Outcome:
        return asyncio.run(train(config, tmp_path / name, resume_from=resume_from))

    alone, together = run(one, "1"), run(two, "2")
    assert len(together.metrics) == NUM_UPDATES
    assert together.metrics[-1][names.GRAD_NORM] > 0
    assert len(together.base_ids) == 2 * (case == "lora")
    assert len(set(together.base_ids)) <= 1
    assert_same(together, alone)
    assert_same(run(two, "2-again", alone.checkpoint), alone)
    assert_same(run(one, "1-again", together.checkpoint), alone)


def test_a_run_in_two_processes_has_the_losses_of_one(config: Config) -> None:
    def losses(num_processes: int) -> list[float]:
        run_dir = f"{config.trainer.run_dir}-{num_processes}"
        settings = changed(
            config, "trainer", num_processes=num_processes, total_steps=4, save_every=None, run_dir=run_dir
        )
        result = runs.train(changed(settings, "actor", lr=3e-4))
        return [line.get(names.LOSS, 0.0) for line in lines_of(result)]  # no loss if no group has variance

    alone = losses(1)
    assert len(alone) == 4
    assert sum(loss != 0 for loss in alone) > 1
    assert losses(2) == pytest.approx(alone, abs=1e-5)
