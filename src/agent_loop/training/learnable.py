"""Checks that a run can learn from its rollouts, before it starts and after the rollout of its first step."""

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
from agent_loop.types import Row, StopReason

UNREWARDING_LOOPS = frozenset({SingleTurnAgentLoop, ToolAgentLoop, AsyncPartialToolAgentLoop})
"""Loops whose rewards come only from tools and interactions."""
GIVE_A_REWARD = (
    "set reward.function, or have a tool's calc_reward, an interaction's calculate_score, an environment's get_reward "
    "or the loop's reward_score give one"
)


def refuse_without_reward(config: Config, rows: Iterable[Row]) -> None:
    """Raise an error if, by its configuration, nothing in a run can score a trajectory.

    Raises:
        ConfigError: The run has no reward function, tool, interaction or environment, and all its loops need one.
    """
    multi_turn, agent = config.rollout.multi_turn, config.rollout.agent
    scores = (
        config.reward.function or config.reward.functions,
        multi_turn.tools,
        multi_turn.tool_config_path,
        multi_turn.interaction_config_path,
        multi_turn.environments,
        agent.loop_files,
        agent.agent_loop_config_path,
    )
    if any(scores) or ":" in config.rollout.default_agent_loop:
        return
    names = {str(row.get("agent_name") or config.rollout.default_agent_loop) for row in rows}
    loops = LoopRegistry()
    if all(loops.get(name, where="agent_name").loop_class in UNREWARDING_LOOPS for name in names):
        raise ConfigError(f"nothing gives a reward, so nothing can be learned; {GIVE_A_REWARD}")


def refuse_truncated_sampling(config: Config) -> None:
    """Raise an error if the samples to train on come from a part of the distribution that their log-probs cover.

    Raises:
        ConfigError: `rollout.top_p` or `rollout.top_k` truncates the distribution.
    """
    for name, full in (("top_p", 1.0), ("top_k", -1)):
        found = getattr(config.rollout, name)
        if found != full:
            raise ConfigError(
                f"rollout.{name} is {found}, but log-probs cover the whole vocabulary, so training on samples from a "
                f"part of it is biased; set rollout.{name}={full:g} (rollout.val.{name} may have any value)"
            )


def refuse_without_lesson(trajectories: Sequence[Trajectory], *, step: int) -> None:
    """Raise an error if no trajectory of a step is scored and has a token to train on.

    Raises:
        TrainingError: No trajectory is; the message explains why.
    """
    reason = why_unlearnable(trajectories)
    if reason is not None:
        raise TrainingError(f"step {step} has nothing to learn from: {reason}")


def why_unlearnable(trajectories: Sequence[Trajectory]) -> str | None:
    """Return why no trajectory is both scored and has a token to train on; None if one is."""
    sampled = [t for t in trajectories if t.output.response_mask.any()]
    if any(t.reward is not None for t in sampled):
        return None
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
    if not sampled and any(t.output.num_model_tokens for t in trajectories):
        return f"a grammar forced every sampled token of {num} trajectories ({ended}); allow more than one completion"
    if not sampled:
        return (
            f"no token was sampled in any of {num} trajectories ({ended}); check the prompts and the limits"
        )
    counts = f"{len(sampled)} trajectories with sampled tokens, of {num}"
    return f"none of the {counts}, was scored ({ended}); {GIVE_A_REWARD}"
