"""Configuration of loops written for verl, and agents that read it."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from agent_loop.config import Config, load_config
from agent_loop.integrations.verl import AgentLoopBase, AgentLoopOutput, register
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import Origin
from tests.compat import langgraph_code
from tests.helpers import hermes_template, text_reply, tool_call_reply

assert langgraph_code

OVERRIDES = [
    "model.path=models/Qwen/Qwen3-0.6B",
    "trainer.project_name=gsm8k",
    "trainer.total_steps=7",
    "rollout.engine_kwargs={tensor_parallel_size: 2}",
    "data.train_files=[train.parquet]",
    "reward.function=rewards.py:score",
]

READ = {
    "actor_rollout_ref.model.path": "models/Qwen/Qwen3-0.6B",
    "actor_rollout_ref.model.trust_remote_code": False,
    "actor_rollout_ref.model.override_config": {},
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.rollout.name": "scripted",
    "actor_rollout_ref.rollout.mode": "async",
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.rollout.temperature": 0.7,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.rollout.prompt_length": 512,
    "actor_rollout_ref.rollout.response_length": 512,
    "actor_rollout_ref.rollout.max_model_len": 1024,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.engine_kwargs.scripted.tensor_parallel_size": 2,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 0.0,
    "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent",
    "actor_rollout_ref.rollout.trace.backend": None,
    "actor_rollout_ref.rollout.multi_turn.enable": True,
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 4,
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": 64,
    "actor_rollout_ref.rollout.multi_turn.format": "hermes",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "tests/compat/tools.yaml",
    "data.train_files": ["train.parquet"],
    "data.max_prompt_length": 512,
    "data.return_raw_chat": True,
    "data.truncation": "error",
    "data.apply_chat_template_kwargs": {},
    "algorithm.adv_estimator": "grpo",
    "algorithm.kl_ctrl.kl_coef": 0.0,
    "trainer.project_name": "gsm8k",
    "trainer.total_training_steps": 7,
    "trainer.default_local_dir": "runs/train",
    "reward_model.reward_manager": "naive",
    "reward.reward_manager.name": "naive",
    "custom_reward_function.path": "rewards.py",
}
seen: list[AgentLoopBase] = []


@register("config_reader")
class ConfigReader(AgentLoopBase):
    """Loop with the constructor of verl's later versions, which stores itself for the test."""

    def __init__(
        self, trainer_config: Any, server_manager: Any, tokenizer: Any, processor: Any, **kwargs: Any
    ) -> None:
        super().__init__(trainer_config, server_manager, tokenizer, processor, **kwargs)
        self.later = kwargs
        self.wrapped = trainer_config.config
        seen.append(self)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics={}, num_turns=2)


def run(config: Config, agent_name: str, *turns: ScriptedReply, num_rows: int = 1) -> list[Trajectory]:
    def script(request: ScriptedRequest) -> ScriptedReply:
        return turns[request.turn]

    async def main() -> list[Trajectory]:
        manager = AgentLoopManager(
            config.rollout, servers=[ScriptedServer(script)], template=hermes_template(), settings=config
        )
        async with manager:
            prompt = [{"role": "user", "content": "What is 6 * 7?"}]
            rows = [{"raw_prompt": prompt, "agent_name": agent_name}] * num_rows
            return await manager.run(rows, n=1)

    return run_virtual(main())


@pytest.fixture
def config() -> Config:
    seen.clear()
    return load_config("tests/compat/config.yaml", overrides=OVERRIDES)


def test_a_loop_reads_every_key_that_verl_documents(config: Config) -> None:
    run(config, "config_reader")
    [loop] = seen
    assert isinstance(loop.config, DictConfig)
    read = {key: OmegaConf.select(loop.config, key, throw_on_missing=True) for key in READ}
    assert {key: OmegaConf.to_object(v) if OmegaConf.is_config(v) else v for key, v in read.items()} == READ


def test_a_configuration_is_a_mapping_with_attributes(config: Config) -> None:
    run(config, "config_reader")
    rollout = seen[0].rollout_config
    assert rollout["multi_turn"]["format"] == rollout.multi_turn.format == "hermes"
    assert rollout.get("does_not_exist", 3) == 3
    assert "does_not_exist" not in rollout
    assert seen[0].data_config.get("apply_chat_template_kwargs", None) == {}
    assert seen[0].apply_chat_template_kwargs == {}


def test_constructors_of_later_versions_receive_further_arguments(config: Config) -> None:
    run(config, "config_reader")
    assert seen[0].processor is None
    assert set(seen[0].later) == {"dataset_cls", "data_config"}
    assert seen[0].later["data_config"].config is seen[0].config.data


def test_the_model_path_defaults_to_the_tokenizers_path() -> None:
    seen.clear()
    config = load_config("tests/compat/config.yaml")
    run(config, "config_reader")
    expected = hermes_template().tokenizer.name_or_path
    assert seen[0].config.actor_rollout_ref.model.path == expected


def test_a_graph_with_a_chat_model_on_the_servers_runs(config: Config) -> None:
    turns = [tool_call_reply("multiply", a=6, b=7), text_reply("It is 42.")]
    [trajectory] = run(config, "graph_agent", *turns)
    output = trajectory.output
    assert output.failure is None
    assert [s.origin for s in output.response_segments] == [Origin.MODEL, Origin.TOOL, Origin.MODEL]
    template = hermes_template()
    assert "42" in template.decode(output.response_segments[1].token_ids)
    assert template.decode(output.response_segments[2].token_ids).startswith("It is 42.")
    assert output.extra_fields["model"] == "Qwen/Qwen3-0.6B"
    assert output.num_turns == 4
