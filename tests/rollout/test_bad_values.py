"""Rewards and log-probs that an update cannot use fail only their own rows. The other rows are trained on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.config import AlgorithmConfig
from agent_loop.environments.live import check_reply
from agent_loop.errors import EnvironmentBug, RewardError, ToolBug
from agent_loop.interactions.base import Reply
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.rewards.function import RewardFunction, read_score
from agent_loop.rollout.batch import assemble
from agent_loop.runtime.numeric import MAX_REWARD
from agent_loop.tools.results import read_reward
from agent_loop.training.advantages.estimate import estimate_advantages, load_estimator
from agent_loop.training.advantages.rewards import collect_rewards
from agent_loop.trajectory import AgentLoopOutput, Feedback, Trajectory
from agent_loop.types import Origin, StopReason
from tests.helpers import text_reply
from tests.rollout.harness import WorkerHarness

BAD_REWARDS = [math.nan, math.inf, 2 * MAX_REWARD, 10**400]


@register("edits_output")
class EditsOutput(AgentLoopBase):
    """Loop that samples one answer and returns the output as the row's `edit` changed it."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        async with self.episode(row["raw_prompt"]) as episode:
            await episode.generate(sampling_params)
        edit = row.get("edit")
        return episode.output() if edit is None else edit(episode.output())


def run_rows(*edits: Any) -> list[Trajectory]:
    harness = WorkerHarness(
        [text_reply("7")] * len(edits),
        agent="edits_output",
        reward=RewardFunction(lambda output, row: 0.5, timeout_s=5),
    )
    rows = [{"raw_prompt": [{"role": "user", "content": "?"}], "edit": edit} for edit in edits]
    return harness.run(rows)


def test_an_output_without_a_prompt_fails_its_row_with_a_message() -> None:
    def without_prompt(output: AgentLoopOutput) -> AgentLoopOutput:
        ids = output.response_ids
        return AgentLoopOutput(prompt_ids=[], response_ids=ids, response_mask=[1] * len(ids))

    bad, good = run_rows(without_prompt, None)
    assert bad.output.failure is not None
    assert "prompt_ids is empty" in bad.output.failure.error
    assert good.output.failure is None


@pytest.mark.parametrize("reward", [*BAD_REWARDS, "x", np.array([1.0, 2.0])])
def test_a_reward_score_that_a_batch_cannot_hold_fails_its_row_with_a_message(reward: Any) -> None:
    bad, good = run_rows(lambda output: replace(output, reward_score=reward), None)

    assert bad.output.stop_reason is StopReason.FAILED
    assert bad.output.failure is not None
    assert "reward_score is " in bad.output.failure.error
    assert "give a finite number, or None" in bad.output.failure.error
    assert bad.reward is None
    assert bad.output.reward_score is None
    assert (good.reward, good.output.stop_reason) == (0.5, StopReason.ANSWERED)


@pytest.mark.parametrize("reward", [True, np.float32(0.25), torch.tensor(2.0), -MAX_REWARD, 3])
def test_a_reward_score_of_another_numeric_type_becomes_a_float(reward: Any) -> None:
    [trajectory] = run_rows(lambda output: replace(output, reward_score=reward))

    assert type(trajectory.reward) is float
    assert type(trajectory.output.reward_score) is float
    assert trajectory.reward == float(reward)


def test_turn_rewards_written_by_a_loop_are_validated() -> None:
    feedback = [Feedback(Origin.TOOL, "judge", place=0, reward=math.nan)]
    bad, good = run_rows(lambda output: replace(output, feedback=feedback), None)

    assert bad.output.failure is not None
    assert "the reward of a turn is " in bad.output.failure.error
    assert good.output.failure is None


@pytest.mark.parametrize("logprob", [math.nan, 0.5])
def test_logprobs_written_by_a_loop_are_validated(logprob: float) -> None:
    def edit(output: AgentLoopOutput) -> AgentLoopOutput:
        logprobs = [-0.5] * len(output.response_ids)
        logprobs[-1] = logprob
        return AgentLoopOutput(
            prompt_ids=output.prompt_ids,
            response_ids=output.response_ids,
            response_mask=output.response_mask.tolist(),
            response_logprobs=logprobs,
        )

    bad, good = run_rows(edit, None)

    assert bad.output.failure is not None
    assert f"response_logprobs holds {logprob}; give log-probs" in bad.output.failure.error
    assert good.output.failure is None


@pytest.mark.parametrize("reward", BAD_REWARDS)
def test_every_source_of_rewards_refuses_values_that_a_batch_cannot_hold(reward: float) -> None:
    with pytest.raises(RewardError, match="return a finite number, or a mapping"):
        read_score(reward, source="judge")
    with pytest.raises(RewardError, match="returned reward"):
        read_score({"reward": reward}, source="judge")
    with pytest.raises(ToolBug, match="return a finite number, or None"):
        read_reward(reward, where="tool 'add'")
    with pytest.raises(EnvironmentBug, match="return a finite number"):
        check_reply(Reply(score=reward), where="interaction 'user'")


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_a_reward_that_is_not_finite_in_the_batch_counts_as_missing(estimator: Any) -> None:
    """Check that the batch validates rewards too, for trajectories that no worker created."""
    config = AlgorithmConfig(adv_estimator=estimator, turn_reward_weight=1.0)
    trajectories = [
        *run_rows(
            *(lambda output, score=score: replace(output, reward_score=score) for score in (0.0, 1.0, 0.0))
        )
    ]
    trajectories = [
        Trajectory(t.output, t.row, 0, rollout, t.reward, {}) for rollout, t in enumerate(trajectories)
    ]
    batch = assemble(trajectories, pad_token_id=0)
    spoilt, clean = batch.clone(), batch.clone()
    spoilt["reward"][2] = math.inf
    spoilt["turn_rewards"][0, 0], spoilt["has_turn_reward"][0, 0] = math.nan, True
    clean["reward"][2] = math.nan

    found, expected = (
        estimate_advantages(
            collect_rewards(each, config=config, response_length=9), estimator=load_estimator(config)
        )
        for each in (spoilt, clean)
    )

    assert found.keep_B.tolist() == [True, True, False]
    assert torch.equal(found.advantages_BR[:2], expected.advantages_BR[:2])
    assert found.advantages_BR[:2].isfinite().all()
