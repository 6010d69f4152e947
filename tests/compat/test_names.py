"""Every name in verl's agent loop documents can be imported, or its error states what to use instead."""

from __future__ import annotations

import asyncio

import pytest

from agent_loop.integrations import verl
from agent_loop.servers.scripted import ScriptedServer


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


def test_the_names_of_verls_documents_can_be_imported() -> None:
    assert [name for name in IMPORTABLE if not callable(getattr(verl, name))] == []


def test_the_error_for_a_name_without_a_counterpart_states_what_to_use_instead() -> None:
    for name in WITHOUT_COUNTERPART:
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


def test_trajectory_info_numbers_the_samples_of_each_prompt() -> None:
    info = asyncio.run(verl.get_trajectory_info(3, [7, 7, 8, 7], False))
    assert [(each["sample_index"], each["rollout_n"]) for each in info] == [(7, 0), (7, 1), (8, 0), (7, 2)]
    assert info[0] == {"step": 3, "sample_index": 7, "rollout_n": 0, "validate": False}
