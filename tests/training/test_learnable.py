"""A run without any signal stops at its first step with an error that states the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agent_loop.config import Config
from agent_loop.errors import ConfigError, TrainingError
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.training.checkpoint import list_checkpoints
from agent_loop.training.monitor import refuse_without_reward
from agent_loop.trajectory import AgentLoopOutput, Failure, Trajectory
from agent_loop.types import Row, StopReason
from tests.training.fakes import FakeRollouts, tiny_policy
from tests.training.test_ppo_trainer import train

Edit = Callable[[Trajectory], Trajectory]


class EditedRollouts(FakeRollouts):
    """Rollouts that apply `edit` to each trajectory from the step `since`."""

    def __init__(self, edit: Edit, *, since: int = 1) -> None:
        super().__init__(tiny_policy())
        self._edit = edit
        self._since = since

    async def run(self, rows: Sequence[Row], **options: Any) -> list[Trajectory]:
        trajectories = await super().run(rows, **options)
        is_edited = self.weight_version + 1 >= self._since
        return [self._edit(t) for t in trajectories] if is_edited else trajectories


def unscored(trajectory: Trajectory) -> Trajectory:
    return structs.replace(trajectory, reward=None)


def too_long(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with an empty answer, which a reward function scored with 0."""
    output = AgentLoopOutput(segments=(), stop_reason=StopReason.PROMPT_LENGTH)
    return structs.replace(trajectory, output=output, reward=0.0)


def failed(trajectory: Trajectory) -> Trajectory:
    output = trajectory.output.failed(Failure(error="Boom: no disk", traceback=""))
    return structs.replace(trajectory, output=output, reward=None)


def empty_or_unscored(trajectory: Trajectory) -> Trajectory:
    return too_long(trajectory) if trajectory.rollout % 2 else unscored(trajectory)


def cancelled_and_empty(trajectory: Trajectory) -> Trajectory:
    output = AgentLoopOutput(segments=(), stop_reason=StopReason.CANCELLED)
    return structs.replace(trajectory, output=output, reward=None)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            unscored,
            "none of the 16 trajectories with sampled tokens, of 16, was scored (16 answered); set reward.f",
        ),
        (too_long, "the prompts of all 16 trajectories are over rollout.prompt_length; raise it"),
        (failed, "all 16 trajectories failed, 16 of them with Boom: no disk; fix that first"),
        (
            empty_or_unscored,
            "of the 8 trajectories with sampled tokens, of 16, was scored (8 answered, 8 prompt_length); set",
        ),
        (
            cancelled_and_empty,
            "no token was sampled in any of 16 trajectories (16 cancelled); check the prompts",
        ),
    ],
)
def test_a_first_step_without_a_signal_stops_the_run_with_the_reason(
    config: Config, edit: Edit, message: str
) -> None:
    rollouts = EditedRollouts(edit)

    with pytest.raises(TrainingError) as error:
        train(config, rollouts=rollouts)

    assert "step 1 has nothing to learn from: " in str(error.value)
    assert message in str(error.value)
    assert rollouts.weight_version == 0
    assert list_checkpoints(Path(config.trainer.run_dir)) == []


@register("scores_itself")
class ScoresItself(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        raise NotImplementedError


@pytest.mark.parametrize(
    "sections",
    [
        {"reward": {"function": "task.py:reward"}},
        {"rollout": {"multi_turn": {"tools": ["task.py:tool"]}}},
        {"rollout": {"multi_turn": {"interaction_config_path": "user.yaml"}}},
        {"rollout": {"agent": {"default_agent_loop": "scores_itself"}}},
        {"rollout": {"agent": {"default_agent_loop": "agent_program"}}},
        {"rollout": {"agent": {"loop_files": ["loops.py"]}}},
    ],
)
def test_a_run_with_a_possible_reward_starts(sections: dict[str, Any]) -> None:
    refuse_without_reward(Config.model_validate(sections), [{}])


@pytest.mark.parametrize("loop", ["single_turn_agent", "tool_agent", "partial_tool_agent"])
def test_a_run_without_any_source_of_reward_is_refused_before_it_starts(loop: str) -> None:
    config = Config.model_validate({"rollout": {"agent": {"default_agent_loop": loop}}})

    with pytest.raises(ConfigError, match="nothing gives a reward, so nothing can be learned; set reward"):
        refuse_without_reward(config, [{}])
