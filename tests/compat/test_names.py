"""Every name in verl's agent loop documents can be imported, or docs/from-verl.md states what to use instead."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from agent_loop.integrations import verl
from agent_loop.servers.scripted import ScriptedServer

PAGE = (Path(__file__).parents[2] / "docs" / "from-verl.md").read_text(encoding="utf-8")


def names(text: str) -> list[str]:
    return text.split()


IMPORTABLE = names(
    """
    AgentData AgentLoopBase AgentLoopManager AgentLoopMetrics AgentLoopOutput AgentLoopWorker AgentState
    AsyncLLMServerManager AsyncPartialToolAgentLoop AsyncSGLangServer AsyncServerBase AsyncvLLMServer
    BaseInteraction BaseTool FunctionCall Gsm8kInteraction Gsm8kTool HermesToolParser RolloutTraceConfig SearchTool
    SingleTurnAgentLoop ToolAgentLoop ToolParser ToolResponse async_server_class get_trajectory_info
    initialize_interactions_from_config initialize_tools_from_config register rollout_trace_attr
    rollout_trace_op simple_timer
    """
)

WITHOUT_COUNTERPART = names(
    """
    ActorRolloutRefWorker AsyncActorRolloutRefWorker AsyncEngine DataProto RLHFDataset RayPPOTrainer
    RayWorkerGroup RolloutWorker SGLangRollout TaskRunner _agent_loop_registry
    copy_to_local hf_tokenizer
    """
)

ON_THE_PAGE = names(
    """
    __num_turns__ _async_rollout_a_request _call_tool _choose_server _init_agent_loop_workers
    _initialize_llm_servers _performance_metrics _postprocess _req_level_generate_sequences _run_agent_loop
    agent_name assistant_turns calc_reward chat_completion create execute extra_fields format
    free_cache_engine generate generate_sequences get_server_address global_steps image image_data index
    init_class init_engine interaction max_assistant_turns max_parallel_calls max_tool_response_length
    max_user_turns messages metrics model_dump num_preempted num_workers prompt_ids prompt_length raw_prompt
    release repetition_penalty request_id request_id_to_server response_ids response_length
    response_logprobs response_mask return_raw_chat reward_score rollout_config sampling_params sleep
    start_interaction temperature tensor_model_parallel_size text timing tool_agent_loop tool_calls
    tool_config_path tool_response_truncate_side tool_rewards tools top_p turn_scores user_turns validate
    video video_data wake_up weighted_serveres is_cancel state finalize_interaction calculate_score
    generate_response single_turn_agent
    """
)


@pytest.mark.parametrize("name", IMPORTABLE)
def test_a_name_in_verls_documents_can_be_imported(name: str) -> None:
    assert callable(getattr(verl, name))


@pytest.mark.parametrize("name", WITHOUT_COUNTERPART)
def test_the_error_for_a_name_without_a_counterpart_states_what_to_use_instead(name: str) -> None:
    with pytest.raises(ImportError, match=f"{name} has no counterpart in agent_loop: .+"):
        getattr(verl, name)
    assert name in words_of_the_page()


@pytest.mark.parametrize("name", [*ON_THE_PAGE, *IMPORTABLE])
def test_a_name_in_verls_documents_is_in_docs_from_verl(name: str) -> None:
    assert name in words_of_the_page()


def words_of_the_page() -> set[str]:
    return set(re.findall(r"\w+", PAGE))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'AgentLoopBoss'"):
        _ = verl.AgentLoopBoss


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


def test_trajectory_info_numbers_the_samples_of_each_prompt() -> None:
    info = asyncio.run(verl.get_trajectory_info(3, [7, 7, 8, 7], False))
    assert [(each["sample_index"], each["rollout_n"]) for each in info] == [(7, 0), (7, 1), (8, 0), (7, 2)]
    assert info[0] == {"step": 3, "sample_index": 7, "rollout_n": 0, "validate": False}
