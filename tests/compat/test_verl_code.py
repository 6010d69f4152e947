"""End-to-end tests of code, registry files, configuration and data in verl's format."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agent_loop.config import Config, load_config
from agent_loop.errors import ConfigError
from agent_loop.integrations import verl
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_rows
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import Origin, Row, StopReason
from tests.compat import verl_code
from tests.helpers import encoded, hermes_template, roles, text_reply, tool_call_reply

CONFIG = "tests/compat/config.yaml"


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(CONFIG)


def run(
    config: Config, rows: Sequence[Row], answers: Sequence[ScriptedReply], **options: Any
) -> list[Trajectory]:
    """Run the rows. Each trajectory receives these completions, turn by turn."""

    def script(request: ScriptedRequest) -> ScriptedReply:
        return answers[request.turn]

    async def main() -> list[Trajectory]:
        servers = [ScriptedServer(script, name=f"scripted-{n}") for n in range(2)]
        async with AgentLoopManager(config.rollout, servers=servers, template=hermes_template()) as manager:
            return await manager.run(rows, **options)

    return run_virtual(main())


def row(**columns: Any) -> dict[str, Any]:
    return {"raw_prompt": [{"role": "user", "content": "What is 6 * 7?"}], **columns}


def test_the_long_names_of_settings_are_verls(config: Config) -> None:
    rollout = config.rollout
    assert (rollout.prompt_length, rollout.response_length) == (512, 512)
    assert (rollout.val.temperature, rollout.agent.num_workers) == (0.0, 2)
    assert rollout.multi_turn.max_tool_response_length == 64
    with pytest.raises(ConfigError, match=r"rollout\.ignore_eos is True, but only False is supported"):
        load_config(CONFIG, overrides=["actor_rollout_ref.rollout.ignore_eos=True"])


def test_a_loop_on_token_ids_runs_unchanged(config: Config) -> None:
    [trajectory] = run(
        config, [row(agent_name="second_thoughts")], [text_reply("41")] * 3 + [text_reply("42")], n=1
    )
    output = trajectory.output
    assert output.failure is None
    assert [s.origin for s in output.segments] == [Origin.PROMPT] + [Origin.MODEL, Origin.TOOL] * 3 + [
        Origin.MODEL
    ]
    assert output.response_mask.sum() == sum(
        len(text_reply(text).token_ids) for text in ("41", "41", "41", "42")
    )
    assert output.num_turns == 8
    assert output.metrics.generate_sequences > 0
    assert output.extra_fields == {"nudges": 3}


@pytest.mark.parametrize("agent_name", ["own_tool_loop", "early_tool_loop"])
def test_a_custom_tool_loop_runs_unchanged(config: Config, agent_name: str) -> None:
    answers = [
        tool_call_reply("score_answer", answer="41"),
        tool_call_reply("score_answer", answer="7" * 80),
        text_reply("#### 42"),
    ]
    [trajectory] = run(config, [row(agent_name=agent_name)], answers, n=1)
    output = trajectory.output
    assert output.failure is None
    assert [s.origin for s in output.response_segments] == [Origin.MODEL, Origin.TOOL] * 2 + [Origin.MODEL]
    assert output.num_turns == 6
    template = hermes_template()
    assert '"name": "score_answer"' in template.decode(output.prompt_ids)
    first, second = (template.decode(output.response_segments[index].token_ids) for index in (1, 3))
    assert "Current parsed answer='41' reward=0.0" in first
    assert "777...(truncated)" in second


def test_a_registered_parser_is_found_by_its_name() -> None:
    parser = verl.ToolParser.get_tool_parser("shouted", hermes_template().tokenizer)
    _, [call] = asyncio.run(parser.extract_tool_calls(encoded('CALL add {"a": 1}')))
    assert call == verl.FunctionCall(name="add", arguments='{"a": 1}')
    with pytest.raises(ConfigError, match=r"unknown tool parser; did you mean 'hermes'\?"):
        verl.ToolParser.get_tool_parser("hermse", hermes_template().tokenizer)


def test_constructor_arguments_come_from_the_registry_file(config: Config) -> None:
    [output] = [t.output for t in run(config, [row(agent_name="nudging")], [text_reply("41")] * 4, n=1)]
    nudge = hermes_template().decode(output.response_segments[1].token_ids)
    assert "Really?" in nudge


def test_a_completion_has_logprobs(config: Config) -> None:
    reply = ScriptedReply(text_reply("42").token_ids, logprobs=[-0.5] * len(text_reply("42").token_ids))
    [output] = [t.output for t in run(config, [row(agent_name="one_shot_with_logprobs")], [reply], n=1)]
    assert output.failure is None
    assert output.response_logprobs is not None
    assert output.response_logprobs.tolist() == [-0.5] * len(output.response_ids)


def test_a_tool_keeps_its_state_and_its_score_is_the_reward(config: Config) -> None:
    tools_kwargs = {"score_answer": {"create_kwargs": {"ground_truth": "42"}}}
    answers = [
        tool_call_reply("score_answer", answer="41"),
        tool_call_reply("score_answer", answer="42"),
        text_reply("#### 42"),
    ]
    [trajectory] = run(config, [row(tools_kwargs=tools_kwargs)], answers, n=1)
    assert trajectory.output.tool_rewards == (-0.05, 0.0)
    assert trajectory.output.messages[2]["content"] == "Current parsed answer='41' reward=0.0"
    assert trajectory.reward == 1.0


def test_an_interaction_replies_until_the_answer_is_right(config: Config) -> None:
    interaction_kwargs = {"name": "patient", "query": "What is 6 * 7?", "ground_truth": "42"}
    answers = [text_reply("#### 41"), text_reply("#### 42")]
    [trajectory] = run(config, [row(interaction_kwargs=interaction_kwargs)], answers, n=1)
    output = trajectory.output
    assert output.stop_reason is StopReason.INTERACTION_FINISHED
    assert output.turn_scores == (0.0, 1.0)
    assert output.feedback[0].extra == {"checked": "#### 41"}
    assert roles(output.messages) == ["user", "assistant", "user", "assistant", "user"]
    assert trajectory.reward == 1.0


def test_data_sets_in_verls_format_can_be_read(config: Config, tmp_path: Path) -> None:
    extra = {
        "split": "train",
        "index": 0,
        "need_tools_kwargs": True,
        "tools_kwargs": {"score_answer": {"create_kwargs": {"ground_truth": "42"}}},
        "interaction_kwargs": {"name": "patient", "query": "6 * 7?", "ground_truth": "42"},
    }
    record = {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": extra,
    }
    pq.write_table(pa.Table.from_pylist([record, record]), tmp_path / "train.parquet")
    rows = load_rows([str(tmp_path / "train.parquet")], prompt_key="prompt")
    assert rows[0]["tools_kwargs"] == extra["tools_kwargs"]
    trajectories = run(config, rows, [tool_call_reply("score_answer", answer="42"), text_reply("#### 42")])
    assert len(trajectories) == 4
    assert [t.output.failure for t in trajectories] == [None] * 4
    assert [t.output.stop_reason for t in trajectories] == [StopReason.INTERACTION_FINISHED] * 4


def test_a_batch_has_the_columns_that_verl_documents(config: Config) -> None:
    def script(request: ScriptedRequest) -> ScriptedReply:
        return tool_call_reply("score_answer", answer="42") if request.turn == 0 else text_reply("#### 42")

    async def main() -> Any:
        servers = [ScriptedServer(script)]
        async with AgentLoopManager(config.rollout, servers=servers, template=hermes_template()) as manager:
            rows = [row(tools_kwargs={"score_answer": {"create_kwargs": {"ground_truth": "42"}}})] * 3
            return await manager.generate_sequences(rows)

    batch = asyncio.run(main())
    num_rows, width = batch["input_ids"].shape
    assert num_rows == 6
    assert batch["prompts"].shape[1] + batch["responses"].shape[1] == width
    assert batch["attention_mask"].shape == batch["position_ids"].shape == (num_rows, width)
    assert batch["response_mask"].shape == batch["responses"].shape
    assert batch["reward"].tolist() == [1.0] * 6


def test_tools_and_interactions_load_by_their_functions() -> None:
    [loaded_tool] = verl.initialize_tools_from_config("tests/compat/tools.yaml")
    assert isinstance(loaded_tool.tool, verl_code.ScoreTool)
    assert loaded_tool.name == "score_answer"
    assert loaded_tool.get_openai_tool_schema().function.name == "score_answer"
    loaded = verl.initialize_interactions_from_config("tests/compat/interactions.yaml")
    assert isinstance(loaded["patient"], verl_code.PatientInteraction)
