"""Checks that a run has something to learn from, before it begins and after the rollout of its first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from agent_loop.config import Config
from agent_loop.errors import ConfigError, TrainingError
from agent_loop.loops.partial import AsyncPartialToolAgentLoop
from agent_loop.loops.registry import LoopRegistry
from agent_loop.loops.single_turn import SingleTurnAgentLoop
from agent_loop.loops.tool_agent import ToolAgentLoop
from agent_loop.trajectory import Trajectory
from agent_loop.types import Origin, Row, StopReason

UNREWARDING_LOOPS = frozenset({SingleTurnAgentLoop, ToolAgentLoop, AsyncPartialToolAgentLoop})
"""Loops whose rewards come from tools and interactions alone."""
GIVE_A_REWARD = (
    "set reward.function, or have a tool's calc_reward, an interaction's calculate_score, an environment's get_reward "
    "or the loop's reward_score give one"
)


def refuse_without_reward(config: Config, rows: Iterable[Row]) -> None:
    """Refuse a run in which nothing can score a trajectory, as far as the configuration alone tells.

    Raises:
        ConfigError: There is no reward function, no tool, no interaction, no environment, and all loops are those of
            this package that need one of them.
    """
    multi_turn, agent = config.rollout.multi_turn, config.rollout.agent
    scores = (
        config.reward.function,
        multi_turn.tools,
        multi_turn.tool_config_path,
        multi_turn.interaction_config_path,
        multi_turn.environments,
        agent.loop_files,
        agent.agent_loop_config_path,
    )
    if any(scores) or ":" in agent.default_agent_loop:
        return
    names = {str(row.get("agent_name") or agent.default_agent_loop) for row in rows}
    loops = LoopRegistry()
    if all(loops.get(name, where="agent_name").loop_class in UNREWARDING_LOOPS for name in names):
        raise ConfigError(f"nothing gives a reward, so nothing can be learned; {GIVE_A_REWARD}")


def refuse_without_lesson(trajectories: Sequence[Trajectory], *, step: int) -> None:
    """Refuse to go on if no trajectory of a step is both scored and has a token of the model's.

    Raises:
        TrainingError: There is none; the message says why.
    """
    spoken = [t for t in trajectories if any(s.origin is Origin.MODEL for s in t.output.segments)]
    if any(t.reward is not None for t in spoken):
        return
    raise TrainingError(f"step {step} has nothing to learn from: {_explain(trajectories, spoken)}")


def _explain(trajectories: Sequence[Trajectory], spoken: Sequence[Trajectory]) -> str:
    num, reasons = len(trajectories), Counter(t.output.stop_reason for t in trajectories)
    failures = Counter(t.output.failure.error for t in trajectories if t.output.failure is not None)
    if not trajectories:
        return "the rollout returned no trajectories; check the rows and rollout.over_sample"
    if reasons[StopReason.PROMPT_LENGTH] == num:
        return (
            f"the prompts of all {num} trajectories are over rollout.prompt_length; raise it, set "
            "rollout.truncate_prompt, or shorten the prompts"
        )
    if failures.total() == num:
        [(error, count)] = failures.most_common(1)
        return f"all {num} trajectories failed, {count} of them with {error}; fix that first"
    ended = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    if failures:
        [(error, count)] = failures.most_common(1)
        ended += f"; {count} failed with {error}"
    if not spoken:
        return (
            f"the model said nothing in any of {num} trajectories ({ended}); check the prompts and the limits"
        )
    return f"nothing scored any trajectory in which the model spoke, {len(spoken)} of {num} ({ended}); {GIVE_A_REWARD}"
