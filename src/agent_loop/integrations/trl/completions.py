"""Conversion of trajectories to the inputs of TRL's trainers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from agent_loop.errors import ConfigError, DataError, RolloutError
from agent_loop.loading import import_extra
from agent_loop.training.advantages.groups import grpo_advantages
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason

TRAJECTORY_KEY = "agent_loop_trajectory"
"""Keyword under which TRL passes the list of trajectories to each reward function."""
UNTRAINED = (StopReason.FAILED, StopReason.CANCELLED)


@dataclass(frozen=True, slots=True)
class TrlCompletion:
    """Tokens of one trajectory for `GRPOTrainer`; never empty."""

    prompt_ids: list[int]
    completion_ids: list[int]
    env_mask: list[int]
    """1 for tokens in the loss: the sampled tokens, unless the trajectory failed."""
    logprobs: list[float] | None

    @classmethod
    def of(cls, trajectory: Trajectory, *, max_tokens: int, pad_token_id: int) -> TrlCompletion:
        """Return the tokens of a trajectory, at most `max_tokens` after the prompt.

        An empty response becomes one padding token outside the mask.
        """
        output = trajectory.output
        prompt_ids: list[int] = output.prompt_ids.tolist() or [pad_token_id]
        token_ids: list[int] = output.response_ids.tolist()[:max_tokens]
        if not token_ids:
            return cls(prompt_ids, [pad_token_id], [0], [0.0])
        is_trained = output.stop_reason not in UNTRAINED
        mask: list[int] = output.response_mask.tolist()[:max_tokens] if is_trained else [0] * len(token_ids)
        logprobs = output.response_logprobs
        return cls(prompt_ids, token_ids, mask, None if logprobs is None else logprobs.tolist()[:max_tokens])


def rollout_output(
    trajectories: Sequence[Trajectory], *, max_tokens: int, pad_token_id: int
) -> dict[str, list[Any] | None]:
    """Return the result of a `rollout_func`: one entry per trajectory under each key."""
    _raise_if_unsupported(trajectories)
    completions = [
        TrlCompletion.of(trajectory, max_tokens=max_tokens, pad_token_id=pad_token_id)
        for trajectory in trajectories
    ]
    logprobs = [completion.logprobs for completion in completions]
    return {
        "prompt_ids": [completion.prompt_ids for completion in completions],
        "completion_ids": [completion.completion_ids for completion in completions],
        "env_mask": [completion.env_mask for completion in completions],
        "logprobs": None if any(each is None for each in logprobs) else logprobs,
        TRAJECTORY_KEY: list(trajectories),
    }


def agent_loop_reward(
    *, agent_loop_trajectory: Sequence[Trajectory], log_metric: Any = None, **_: Any
) -> list[float | None]:
    """Return the reward of each trajectory, None if it failed. The reward function for `GRPOTrainer`."""
    _raise_if_unscored(agent_loop_trajectory)
    if log_metric is not None:
        num_failed = sum(t.output.stop_reason is StopReason.FAILED for t in agent_loop_trajectory)
        log_metric("agent_loop/failed_share", num_failed / len(agent_loop_trajectory))
        for name in ("num_turns", "num_tool_calls"):
            values = [
                _trajectory_metrics(trajectory)[f"agent_loop/{name}"] for trajectory in agent_loop_trajectory
            ]
            log_metric(f"agent_loop/{name}", sum(values) / len(values))
    return [trajectory.reward for trajectory in agent_loop_trajectory]


def rollout_samples(trajectories: Sequence[Trajectory], *, group_id: int, max_tokens: int) -> list[Any]:
    """Return the samples of one group for `AsyncGRPOTrainer`: the scored trajectories with their advantages."""
    _raise_if_unsupported(trajectories)
    _raise_if_unscored(trajectories)
    rewards_B = torch.tensor([torch.nan if t.reward is None else t.reward for t in trajectories])
    advantages_B = grpo_advantages(rewards_B, groups_B=torch.zeros(len(trajectories), dtype=torch.int64))
    advantages: list[float] = cast(Any, advantages_B).tolist()
    std = float(np.std([t.reward for t in trajectories if t.reward is not None] or [0.0]))
    samples = [
        _rollout_sample(
            trajectory, advantage=advantage, group_id=group_id, max_tokens=max_tokens, reward_std=std
        )
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
        if trajectory.reward is not None and trajectory.output.response_mask[:max_tokens].any()
    ]
    if not samples:
        reasons = sorted({trajectory.output.stop_reason.value for trajectory in trajectories})
        raise RolloutError(
            f"group {group_id} has nothing to train on: its trajectories ended with {', '.join(reasons)}"
        )
    return samples


def _rollout_sample(
    trajectory: Trajectory, *, advantage: float, group_id: int, max_tokens: int, reward_std: float
) -> Any:
    worker = import_extra("trl.experimental.async_grpo.async_rollout_worker", extra="trl", by=__name__)
    output = trajectory.output
    if output.response_logprobs is None:
        raise ConfigError(
            "the servers return no log-probs, which AsyncGRPOTrainer needs; use an engine that returns them"
        )
    num_prompt = len(output.prompt_ids)
    zeros = np.zeros(num_prompt)
    versions = output.weight_versions[output.response_mask.astype(bool)]
    return worker.RolloutSample(
        prompt=list(trajectory.row["raw_prompt"]),
        completion=list(output.messages[len(trajectory.row["raw_prompt"]) :]),
        input_ids=np.concatenate([output.prompt_ids, output.response_ids[:max_tokens]]).astype(np.int64),
        completion_mask=np.concatenate([zeros, output.response_mask[:max_tokens]]).astype(np.int64),
        old_log_probs=np.concatenate([zeros, output.response_logprobs[:max_tokens]]).astype(np.float32),
        advantage=advantage,
        model_version=int(versions.min()),
        group_id=group_id,
        metrics={
            "reward": float(trajectory.reward or 0.0),
            "reward_std": reward_std,
            **_trajectory_metrics(trajectory),
        },
        enqueued_at=time.time(),
    )


def _trajectory_metrics(trajectory: Trajectory) -> Mapping[str, float]:
    output = trajectory.output
    return {
        "agent_loop/num_turns": float(output.num_turns),
        "agent_loop/num_tool_calls": float(output.metrics.num_tool_calls),
    }


def _raise_if_unscored(trajectories: Sequence[Trajectory]) -> None:
    if all(t.reward is None and t.output.stop_reason not in UNTRAINED for t in trajectories):
        raise RolloutError(
            f"none of {len(trajectories)} trajectories has a reward; set reward.function, or return rewards from tools "
            "or the loop"
        )


def _raise_if_unsupported(trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        if trajectory.branch is not None:
            raise DataError(
                f"the loop of {trajectory.trajectory_id} returned a list of outputs, but TRL accepts one completion "
                "per prompt; return one output, or train with agent-loop train"
            )
        if trajectory.output.attachments:
            raise DataError(
                f"{trajectory.trajectory_id} has images, which this integration does not pass to TRL; train with "
                "agent-loop train"
            )
