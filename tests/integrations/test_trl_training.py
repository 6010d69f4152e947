"""Training of TRL's `GRPOTrainer` and `AsyncGRPOTrainer` on the demo task, with the embedded engine."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agent_loop.config import Config
from agent_loop.integrations.trl import AgentLoopRollouts
from agent_loop.integrations.trl.completions import TRAJECTORY_KEY
from examples.two_hop_lookup.task import train_rows

trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'"),
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning"),
]

GROUP_SIZE = 8
NUM_GROUPS = 8


ON_A_CPU: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "num_generations": GROUP_SIZE,
    "max_completion_length": 128,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}


def grpo_args(folder: Path, **changes: Any) -> Any:
    """Return arguments for rollouts of 64 trajectories, each with two updates on half of them."""
    values: dict[str, Any] = {
        "per_device_train_batch_size": NUM_GROUPS * GROUP_SIZE // 2,
        "steps_per_generation": 2,
        "lr_scheduler_type": "constant",
        "epsilon_high": 0.28,
    }
    return trl.GRPOConfig(output_dir=str(folder), **ON_A_CPU, **{**values, **changes})


def test_training_learns_to_call_the_tools(task_config: Config, model_path: Path, tmp_path: Path) -> None:
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


def test_the_loss_covers_the_sampled_tokens(task_config: Config, model_path: Path, tmp_path: Path) -> None:
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
            args=grpo_args(tmp_path, max_steps=2, steps_per_generation=1, per_device_train_batch_size=64),
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
    all_versions = [trajectory.output.weight_versions.tolist() for trajectory in output[TRAJECTORY_KEY]]
    return [version for versions in all_versions for version in versions if version >= 0]


class CpuFlashAttention:
    """Stub of the kernel with the only function that TRL calls, for segments that attend to their prefixes."""

    @staticmethod
    def flash_attn_varlen_func(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_starts: Tensor,
        key_starts: Tensor,
        *_: Any,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> Tensor:
        """Return causal attention with the mask aligned to the end of the keys. Shapes are [tokens, heads,
        head_dim]."""
        segments: list[Tensor] = []
        borders = zip(pairwise(query_starts.tolist()), pairwise(key_starts.tolist()), strict=True)
        for (first, end), (first_key, end_key) in borders:
            num_queries, num_keys = end - first, end_key - first_key
            is_seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
            attended = scaled_dot_product_attention(
                query[first:end].transpose(0, 1),
                key[first_key:end_key].transpose(0, 1),
                value[first_key:end_key].transpose(0, 1),
                attn_mask=is_seen,
                scale=softmax_scale,
                enable_gqa=True,
            )
            segments.append(attended.transpose(0, 1))
        return torch.cat(segments)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the GPU kernel and the GPU speed that the trainer expects."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    monkeypatch.setattr(packing, "_flash_attn", CpuFlashAttention)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


@pytest.mark.usefixtures("on_a_cpu")
def test_ten_steps_train_on_fresh_samples(task_config: Config, model_path: Path, tmp_path: Path) -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer  # late: takes seconds

    settings: dict[str, Any] = {
        "per_device_train_batch_size": 32,
        "token_budget": 0,
        "max_staleness": 2,
        "max_steps": 10,
    }
    args = AsyncGRPOConfig(output_dir=str(tmp_path), **ON_A_CPU, **settings)
    with AgentLoopRollouts(task_config) as rollouts:
        rows = train_rows()
        worker = rollouts.worker(rows, args=args)
        trainer = AsyncGRPOTrainer(
            model=str(model_path),
            args=args,
            train_dataset=rollouts.dataset(rows),
            rollout_worker=worker,
            weight_transfer=worker.weight_transfer,
        )
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert trainer.state.global_step == 10
    assert worker.model_version == 11
    assert len(logs) == 10
    assert all(0 <= entry["reward"] <= 1 for entry in logs)
    assert all(entry["sample/staleness_max"] <= 2 for entry in logs)
    assert max(entry["agent_loop/num_tool_calls"] for entry in logs) > 0.3
    # The first samples come from the trained weights, so the ratio differs from 1 only by rounding.
    assert logs[0]["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert logs[0]["kl"] == pytest.approx(0.0, abs=1e-4)
