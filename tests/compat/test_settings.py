"""Settings of verl: the names that its documents use, and what loops and agents of its users read."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from agent_loop.config import Config, load_config
from agent_loop.integrations import verl
from agent_loop.integrations.verl import AgentLoopBase, AgentLoopOutput, register
from agent_loop.servers.scripted import ScriptedServer
from tests.compat.harness import CONFIG, row, run
from tests.helpers import hermes_template

IMPORTABLE = """
    AgentData AgentLoopBase AgentLoopManager AgentLoopMetrics AgentLoopOutput AgentLoopWorker AgentState
    AsyncLLMServerManager AsyncPartialToolAgentLoop AsyncSGLangServer AsyncServerBase AsyncvLLMServer
    BaseInteraction BaseTool FunctionCall Gsm8kInteraction Gsm8kTool HermesToolParser RolloutTraceConfig SearchTool
    SingleTurnAgentLoop ToolAgentLoop ToolParser ToolResponse async_server_class get_trajectory_info
    initialize_interactions_from_config initialize_tools_from_config register rollout_trace_attr
    rollout_trace_op simple_timer
"""
WITHOUT_COUNTERPART = """
    ActorRolloutRefWorker AsyncActorRolloutRefWorker AsyncEngine DataProto RLHFDataset RayPPOTrainer
    RayWorkerGroup RolloutWorker SGLangRollout TaskRunner _agent_loop_registry
    copy_to_local hf_tokenizer
"""


def test_the_names_of_verls_documents_can_be_imported() -> None:
    assert [name for name in IMPORTABLE.split() if not callable(getattr(verl, name))] == []


def test_the_error_for_a_name_without_a_counterpart_states_what_to_use_instead() -> None:
    for name in WITHOUT_COUNTERPART.split():
        with pytest.raises(ImportError, match=f"{name} has no counterpart in agent_loop: .+"):
            getattr(verl, name)


def test_the_server_class_of_an_engine_or_of_a_module_is_found() -> None:
    assert verl.async_server_class("scripted") is ScriptedServer
    found = verl.async_server_class(
        rollout_backend="mine",
        rollout_backend_module="agent_loop.servers.scripted",
        rollout_backend_class="ScriptedServer",
    )
    assert found is ScriptedServer


def test_the_trace_of_a_run_is_configured_by_settings_alone(caplog: pytest.LogCaptureFixture) -> None:
    verl.RolloutTraceConfig.init("project", "experiment", "mlflow", True)
    assert (verl.RolloutTraceConfig.get_backend(), verl.RolloutTraceConfig.enable_token2text()) == (
        "mlflow",
        True,
    )
    assert "set rollout.trace.backend=mlflow" in caplog.text


async def test_trajectory_info_numbers_the_samples_of_each_prompt() -> None:
    info = await verl.get_trajectory_info(3, [7, 7, 8, 7], False)
    assert [(each["sample_index"], each["rollout_n"]) for each in info] == [(7, 0), (7, 1), (8, 0), (7, 2)]
    assert info[0] == {"step": 3, "sample_index": 7, "rollout_n": 0, "validate": False}


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
    "actor_rollout_ref.rollout.prometheus.port": None,
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
    "trainer.balance_batch": True,
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
        seen.append(self)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics={}, num_turns=2)


def read_by_a_loop(config: Config) -> Any:
    """Return a loop that was given the configuration."""
    seen.clear()
    run(config, [row(agent_name="config_reader")], settings=config)
    return seen.pop()


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(CONFIG, overrides=OVERRIDES)


def test_a_loop_reads_every_key_that_verl_documents(config: Config) -> None:
    loop = read_by_a_loop(config)
    assert isinstance(loop.config, DictConfig)
    read = {key: OmegaConf.select(loop.config, key, throw_on_missing=True) for key in READ}
    assert {key: OmegaConf.to_object(v) if OmegaConf.is_config(v) else v for key, v in read.items()} == READ
    assert loop.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu > 0
    rollout = loop.rollout_config
    assert rollout["multi_turn"]["format"] == rollout.multi_turn.format == "hermes"
    assert rollout.get("does_not_exist", 3) == 3
    assert "does_not_exist" not in rollout
    assert loop.data_config.get("apply_chat_template_kwargs", None) == {}
    assert loop.apply_chat_template_kwargs == {}


def test_constructors_of_later_versions_receive_further_arguments(config: Config) -> None:
    loop = read_by_a_loop(config)
    assert loop.processor is None
    assert set(loop.later) == {"dataset_cls", "data_config"}
    assert loop.later["data_config"].config is loop.config.data


def test_the_model_path_defaults_to_the_tokenizers_path() -> None:
    path = read_by_a_loop(load_config(CONFIG)).config.actor_rollout_ref.model.path
    assert path == hermes_template().tokenizer.name_or_path
