"""Training of TRL's `GRPOTrainer` on the demo task, with the tool loop and the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agent_loop.config import Config
from agent_loop.integrations.trl import AgentLoopRollouts
from agent_loop.integrations.trl.completions import TRAJECTORY_KEY
from examples.two_hop_lookup.task import train_rows

trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning"),
]

GROUP_SIZE = 8
NUM_GROUPS = 8


def grpo_args(folder: Path, **changes: Any) -> Any:
    """Return arguments for rollouts of 64 trajectories, each with two updates on half of them."""
    return trl.GRPOConfig(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "num_generations": GROUP_SIZE,
            "per_device_train_batch_size": NUM_GROUPS * GROUP_SIZE // 2,
            "steps_per_generation": 2,
            "max_completion_length": 128,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "epsilon_high": 0.28,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            **changes,
        }
    )


def test_training_learns_the_demo_task_with_tool_calls(
    task_config: Config, model_path: Path, tmp_path: Path
) -> None:
    with AgentLoopRollouts(task_config) as rollouts:
        trainer = trl.GRPOTrainer(
            str(model_path),
            reward_funcs=rollouts.reward_func,
            rollout_func=rollouts.rollout_func,
            train_dataset=rollouts.dataset(train_rows()),
            args=grpo_args(tmp_path, max_steps=24),
        )
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logs) == 12
    assert logs[0]["agent_loop/num_tool_calls"] < 1.2 < logs[-1]["agent_loop/num_tool_calls"]
    assert logs[0]["reward"] < 0.4
    assert sum(entry["reward"] for entry in logs[-3:]) / 3 > 0.6


def test_the_loss_covers_exactly_the_sampled_tokens(
    task_config: Config, model_path: Path, tmp_path: Path
) -> None:
    outputs: list[dict[str, Any]] = []

    class Watched(trl.GRPOTrainer):
        """Trainer that stores the log-probs of the loss."""

        logprobs: torch.Tensor
        batch: dict[str, torch.Tensor]

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            logprobs, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self.logprobs = logprobs
            if logprobs.requires_grad:
                logprobs.retain_grad()
            return (logprobs, *others)

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            self.batch = inputs
            return super()._compute_loss(model, inputs)

    with AgentLoopRollouts(task_config) as rollouts:

        def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            outputs.append(rollouts.rollout_func(prompts, trainer))
            return outputs[-1]

        trainer = Watched(
            str(model_path),
            reward_funcs=rollouts.reward_func,
            rollout_func=rollout_func,
            train_dataset=rollouts.dataset(train_rows()),
            args=grpo_args(
                tmp_path,
                max_steps=2,
                steps_per_generation=1,
                per_device_train_batch_size=NUM_GROUPS * GROUP_SIZE,
            ),
        )
        trainer.train()

    # 1. The rollout after the first update uses the weights of that update.
    assert [{*versions(output)} for output in outputs] == [{0}, {1}]

    # 2. In the last batch, tokens of tools have no gradient, and sampled tokens have a gradient if they have an
    #    advantage.
    batch, gradient = trainer.batch, trainer.logprobs.grad
    assert gradient is not None
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    is_tool = (batch["completion_mask"] * (1 - batch["tool_mask"])).bool()
    assert is_tool.any()
    assert not gradient[~mask].any()
    has_advantage = batch["advantages"][:, None] != 0
    assert (gradient != 0)[mask & has_advantage].all()
    assert int(mask.sum()) == sum(sum(mask) for mask in outputs[-1]["env_mask"])

    # 3. The trainer computes the log-probs with which the tokens were sampled.
    difference = (trainer.logprobs.detach() - batch["sampling_per_token_logps"])[mask]
    assert difference.abs().max() < 1e-3


def versions(output: dict[str, Any]) -> list[int]:
    """Return the weight versions of all sampled tokens."""
    return [
        version
        for trajectory in output[TRAJECTORY_KEY]
        for version in trajectory.output.weight_versions.tolist()
        if version >= 0
    ]
