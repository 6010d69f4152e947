"""Load the components that a configuration names, in the manager's process and in the processes of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from agent_loop.chat.template import ChatTemplate, load_chat_template
from agent_loop.config import Config, RolloutConfig
from agent_loop.environments.factory import load_environments
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.errors import ConfigError
from agent_loop.interactions.registry import load_interactions
from agent_loop.loops.base import LoopContext
from agent_loop.loops.registry import LoopRegistry
from agent_loop.rewards.combined import load_rewards
from agent_loop.rewards.function import BatchRewardFunction, RewardFunction, load_batch_reward, load_reward
from agent_loop.rollout.gate import AdaptiveGate, AdmissionGate
from agent_loop.rollout.monitor import TrajectoryMonitor
from agent_loop.rollout.worker import AgentLoopWorker
from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.pool import ServerPool
from agent_loop.tools.base import BaseTool
from agent_loop.tools.registry import load_tools


def load_template(config: Config) -> ChatTemplate:
    """Load the chat template of the model."""
    return load_chat_template(
        config.model.tokenizer_path or config.model.path,
        tool_parser=config.rollout.multi_turn.format,
        chat_template_path=config.model.chat_template_path,
        trust_remote_code=config.model.trust_remote_code,
        encoder=config.model.encoder,
        model_path=config.model.path,
        variables=config.model.chat_template_kwargs,
    )


def load_reward_function(config: Config) -> RewardFunction | BatchRewardFunction | None:
    """Load the reward function, or the sum of several ones, if the configuration names any."""
    reward = config.reward
    if reward.functions:
        return load_rewards(reward)
    if reward.function is None:
        if reward.batch:
            raise ConfigError(
                "reward.batch is true, but there is no reward.function; set reward.function, or leave reward.batch out"
            )
        return None
    load = load_batch_reward if reward.batch else load_reward
    return load(reward.function, timeout_s=reward.timeout_s)


def load_loops(config: RolloutConfig) -> LoopRegistry:
    """Load the agent loops."""
    loops = LoopRegistry(loop_files=config.agent.loop_files, config_path=config.agent.agent_loop_config_path)
    loops.load_default(config.default_agent_loop)
    return loops


def load_context(
    config: RolloutConfig,
    *,
    server_manager: AsyncLLMServerManager,
    template: ChatTemplate,
    settings: Config | None = None,
    tools: Mapping[str, BaseTool] | None = None,
) -> LoopContext:
    """Return the context of every loop, with tools, interactions and environments loaded."""
    multi_turn = config.multi_turn
    return LoopContext(
        server_manager=server_manager,
        template=template,
        limits=_limits(config),
        multi_turn=multi_turn,
        tools={**load_tools(multi_turn.tools, config_path=multi_turn.tool_config_path), **(tools or {})},
        interactions=load_interactions(multi_turn.interaction_config_path),
        environments=load_environments(multi_turn.environments),
        settings=(settings or Config()).model_copy(update={"rollout": config}),
    )


def make_server_manager(
    config: RolloutConfig, servers: Sequence[AsyncServerBase], *, vocab_size: int | None
) -> AsyncLLMServerManager:
    """Make the client of these servers."""
    pool = ServerPool(
        servers,
        restart_timeout_s=config.start_timeout_s,
    )
    return AsyncLLMServerManager(pool, request_timeout_s=config.request_timeout_s, vocab_size=vocab_size)


def make_worker(
    config: RolloutConfig,
    *,
    context: LoopContext,
    loops: LoopRegistry,
    reward: RewardFunction | BatchRewardFunction | None,
    gate: AdmissionGate | None = None,
) -> AgentLoopWorker:
    """Make a worker."""
    pool = context.server_manager.pool
    gate = gate or make_gate(config.max_concurrent, pool=pool)
    return AgentLoopWorker(
        context,
        loops=loops,
        default_agent_loop=config.default_agent_loop,
        reward=reward if isinstance(reward, RewardFunction) else None,
        gate=gate,
        monitor=TrajectoryMonitor(gate=gate, pool=pool, silence_s=config.watchdog_s),
        retries=config.retries,
    )


def make_gate(
    max_concurrent: int | Literal["auto"] | None, *, pool: ServerPool, num_workers: int = 1
) -> AdmissionGate:
    """Return the gate that admits the trajectories of `num_workers` as `rollout.max_concurrent` says."""
    if max_concurrent == "auto":
        return AdaptiveGate(pool)
    return AdmissionGate() if max_concurrent is None else AdmissionGate(bound=max_concurrent * num_workers)


def _limits(config: RolloutConfig) -> EpisodeLimits:
    return EpisodeLimits(
        prompt_length=config.prompt_length,
        response_length=config.response_length,
        truncate_prompt=config.truncate_prompt,
        max_assistant_turns=config.multi_turn.max_assistant_turns,
        max_user_turns=config.multi_turn.max_user_turns,
        max_turn_tokens=config.multi_turn.max_turn_tokens,
        deadline_s=config.trajectory_timeout_s,
        turn_timeout_s=config.multi_turn.turn_timeout_s,
        generate_timeout_s=config.generate_timeout_s,
    )
