"""A run without a signal says why and stops, and the beginning of a known collapse is reported once."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agent_loop.config import Config
from agent_loop.errors import ConfigError, TrainingError
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.training import metrics as names
from agent_loop.training.checkpoint import latest_checkpoint, list_checkpoints
from agent_loop.training.metrics import read_metrics
from agent_loop.training.monitor import CUT_SHARE, Monitor, refuse_without_reward, why_dead
from agent_loop.trajectory import AgentLoopOutput, Failure, Trajectory
from agent_loop.types import StopReason
from tests.training.fakes import FakeRollouts
from tests.training.runs import changed, train


@register("scores_itself")
class ScoresItself(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("sections", "can_learn"),
    [
        ({"reward": {"function": "task.py:reward"}}, True),
        ({"rollout": {"multi_turn": {"tools": ["task.py:tool"]}}}, True),
        ({"rollout": {"multi_turn": {"interaction_config_path": "user.yaml"}}}, True),
        ({"rollout": {"agent": {"default_agent_loop": "scores_itself"}}}, True),
        ({"rollout": {"agent": {"default_agent_loop": "agent_program"}}}, True),
        ({"rollout": {"agent": {"loop_files": ["loops.py"]}}}, True),
        ({"rollout": {"agent": {"default_agent_loop": "single_turn_agent"}}}, False),
        ({"rollout": {"agent": {"default_agent_loop": "tool_agent"}}}, False),
        ({"rollout": {"agent": {"default_agent_loop": "partial_tool_agent"}}}, False),
    ],
)
def test_a_run_without_any_source_of_reward_is_refused_before_it_starts(
    sections: dict[str, Any], can_learn: bool
) -> None:
    config = Config.model_validate(sections)
    if can_learn:
        refuse_without_reward(config, [{}])
    else:
        with pytest.raises(ConfigError, match="nothing gives a reward, so nothing can be learned; set"):
            refuse_without_reward(config, [{}])


def unscored(trajectory: Trajectory, step: int) -> Trajectory:
    return structs.replace(trajectory, reward=None)


def empty(trajectory: Trajectory, reason: StopReason, reward: float | None) -> Trajectory:
    return structs.replace(trajectory, output=AgentLoopOutput(segments=(), stop_reason=reason), reward=reward)


def too_long(trajectory: Trajectory, step: int) -> Trajectory:
    """Return the trajectory with an empty answer, which a reward function scored with 0."""
    return empty(trajectory, StopReason.PROMPT_LENGTH, 0.0)


def failed(trajectory: Trajectory, step: int) -> Trajectory:
    output = trajectory.output.failed(Failure(error="Boom: no disk", traceback=""))
    return structs.replace(trajectory, output=output, reward=None)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (unscored, "none of the 16 trajectories with sampled tokens, of 16, was scored (16 answered); set"),
        (too_long, "the prompts of all 16 trajectories are over rollout.prompt_length; raise it"),
        (failed, "all 16 trajectories failed, 16 of them with Boom: no disk; fix that first"),
        (
            lambda t, step: too_long(t, step) if t.rollout % 2 else unscored(t, step),
            "of the 8 trajectories with sampled tokens, of 16, was scored (8 answered, 8 prompt_length); set",
        ),
        (
            lambda t, step: empty(t, StopReason.CANCELLED, None),
            "no token was sampled in any of 16 trajectories (16 cancelled); check the prompts",
        ),
    ],
)
def test_a_first_step_without_a_signal_stops_the_run_with_the_reason(
    config: Config, edit: Callable[[Trajectory, int], Trajectory], message: str
) -> None:
    rollouts = FakeRollouts(edit=edit)
    with pytest.raises(TrainingError) as error:
        train(config, rollouts)
    assert "step 1 has nothing to learn from: " in str(error.value)
    assert message in str(error.value)
    assert rollouts.weight_version == 0
    assert list_checkpoints(Path(config.trainer.run_dir)) == []


def run(config: Config, dead_steps: Sequence[int], **trainer: Any) -> str:
    """Train with rewards that are all 0 in some steps, and return what the console showed."""

    def reward(trajectory: Trajectory, step: int) -> Trajectory:
        return structs.replace(
            trajectory, reward=0.0 if step in dead_steps else float(trajectory.rollout % 2)
        )

    output = io.StringIO()
    train(changed(config, "trainer", **trainer), FakeRollouts(edit=reward), output=output)
    return output.getvalue()


def test_the_first_dead_step_of_a_row_of_them_is_reported_once_and_they_are_counted(config: Config) -> None:
    shown = run(config, [2, 3, 5], total_steps=5)
    assert [line.split(":")[0] for line in shown.splitlines() if "nothing to learn" in line] == [
        "step 2 has nothing to learn from",
        "step 5 has nothing to learn from",
    ]
    lines = read_metrics(Path(config.trainer.run_dir) / "metrics.jsonl")
    assert [line[names.DEAD_STEPS] for line in lines] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_too_many_dead_steps_in_a_row_save_and_stop_the_run(config: Config, mode: str) -> None:
    with pytest.raises(
        TrainingError,
        match=r"^steps 2 to 4 had nothing .*; step 4: all 16 rewards are 0, .*max_dead_steps is 3",
    ):
        run(config, range(2, 9), total_steps=8, max_dead_steps=3, save_every=8, mode=mode, max_staleness=0)
    assert latest_checkpoint(Path(config.trainer.run_dir)).step == 4


ALIVE = {
    names.SIGNAL_SHARE: 0.5,
    names.SUCCESS_SHARE: 0.5,
    names.ADVANTAGE_MEAN: 0.0,
    names.ADVANTAGE_STD: 1.0,
    names.ROWS_TRAINED: 8.0,
    names.OPTIMIZER_STEPS: 2.0,
    names.NONFINITE_UPDATES: 0.0,
}
"""Metrics of a step that had a signal."""


def sampled(num_rows: int) -> list[Trajectory]:
    """Return groups of four trajectories with equal rewards, which differ between groups."""
    rollouts = FakeRollouts(edit=lambda t, step: structs.replace(t, reward=float(t.group)))
    rows = [{"raw_prompt": [{"role": "user", "content": "2 3"}]}] * num_rows
    return asyncio.run(rollouts.run(rows, n=4))


@pytest.mark.parametrize(
    ("num_rows", "metrics", "reason"),
    [
        (4, {names.SIGNAL_SHARE: 0.0}, "in each of the 4 groups, all rewards are equal or only one"),
        (1, {names.SIGNAL_SHARE: 0.0}, "all 4 rewards are 0, so no trajectory is better than another; use"),
        (1, {names.SIGNAL_SHARE: 0.0, names.SUCCESS_SHARE: 1.0}, "all 4 rewards are 0, .*may be solved"),
        (4, {names.ADVANTAGE_STD: 0.0}, "in each of the 4 groups"),
        (4, {names.ROWS_TRAINED: 0.0}, r"no trajectory with a signal may be trained \(16 answered\); change"),
        (4, {names.MASKED_SHARE: 1.0}, "actor.correction masks every token"),
        (4, {names.OPTIMIZER_STEPS: 0.0, names.NONFINITE_UPDATES: 2.0}, "no gradient was finite; lower"),
    ],
)
def test_a_step_that_no_update_can_use_is_dead(num_rows: int, metrics: dict[str, float], reason: str) -> None:
    with pytest.raises(TrainingError, match=f"step 1: {reason}"):
        monitor_of(1, sampled(num_rows), ALIVE | metrics)


def monitor_of(max_dead_steps: int, trajectories: Sequence[Trajectory], metrics: dict[str, float]) -> None:
    """Raise the error of a run with this step alone."""
    monitor = Monitor(max_dead_steps=max_dead_steps, report=lambda _: None)
    monitor.add(trajectories, metrics, step=1)
    error = monitor.error(step=1)
    if error is not None:
        raise error


def test_a_step_with_a_signal_and_a_step_of_the_critic_alone_are_not_dead() -> None:
    of_critic = {key: value for key, value in ALIVE.items() if not key.startswith(names.ACTOR)}
    for metrics in (ALIVE, of_critic, ALIVE | {names.SIGNAL_SHARE: 0.0, names.SFT_TOKENS: 5.0}):
        assert why_dead(sampled(1), metrics) is None


HEALTHY = {
    names.ENTROPY: 0.5,
    names.RESPONSE_LENGTH_MEAN: 100.0,
    names.SIGNAL_SHARE: 0.5,
    names.LOGPROB_DIFF_MEAN: 0.01,
    names.NONFINITE_UPDATES: 0.0,
    names.CRITIC_NONFINITE_UPDATES: 0.0,
}


def warnings_of(values: Sequence[float], *, metric: str) -> list[str]:
    """Return the warnings of a run whose other metrics are healthy."""
    shown: list[str] = []
    watch = Monitor(max_dead_steps=None, report=shown.append)
    for step, value in enumerate(values, start=1):
        watch.check({**HEALTHY, metric: value}, step=step)
    return shown


@pytest.mark.parametrize(
    ("metric", "good", "bad"),
    [
        (names.ENTROPY, [0.5] * 5, [0.04] * 3),
        (names.RESPONSE_LENGTH_MEAN, [100] * 5, [210] * 3),
        (CUT_SHARE, [0.2] * 5, [0.6] * 3),
        (names.SIGNAL_SHARE, [0.5] * 5, [0.02, 0.0, 0.04]),
        (names.LOGPROB_DIFF_MEAN, [0.01] * 5, [0.2] * 3),
    ],
)
def test_a_collapse_is_reported_once_until_it_has_recovered(
    metric: str, good: list[float], bad: list[float]
) -> None:
    assert len(warnings_of([*good, *bad, *bad, *bad], metric=metric)) == 1
    assert len(warnings_of([*good, *bad, *good, *bad], metric=metric)) == 2
    assert warnings_of(good * 5, metric=metric) == []


def test_one_unusual_step_gives_no_warning() -> None:
    assert warnings_of([0.5] * 6 + [0.001] + [0.5] * 3, metric=names.ENTROPY) == []
    assert warnings_of([0.5] * 6 + [0.01, 0.01] + [0.5] * 3, metric=names.SIGNAL_SHARE) == []
