"""Loops, tools, parsers, interactions and servers in the forms that verl documents."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.testclient import TestClient

from agent_loop.checks import check_server
from agent_loop.config import Config, MultiTurnConfig, RolloutConfig, load_config
from agent_loop.config.rollout import AgentConfig
from agent_loop.errors import ConfigError, WeightsError
from agent_loop.integrations import verl
from agent_loop.integrations.verl import (
    AgentData,
    AgentLoopOutput,
    AgentState,
    AsyncServerBase,
    ToolAgentLoop,
    build_gpt_oss_tool_response_text,
    register,
)
from agent_loop.loading import load_module
from agent_loop.loops import registry
from agent_loop.rewards.function import load_reward
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.factory import create_servers
from agent_loop.servers.scripted import ScriptedReply
from agent_loop.testing import run_virtual
from agent_loop.trajectory import IncidentKind
from agent_loop.types import Origin, StopReason
from tests.compat import verl_code
from tests.compat.harness import CONFIG, RULES, row, run
from tests.helpers import encoded, hermes_template, roles, text_reply, tool_call_reply


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(CONFIG)


@pytest.mark.parametrize("agent_name", ["own_tool_loop", "early_tool_loop"])
def test_a_custom_tool_loop_runs_unchanged(config: Config, agent_name: str) -> None:
    answers = [
        tool_call_reply("score_answer", answer="41"),
        tool_call_reply("score_answer", answer="7" * 80),
        text_reply("#### 42"),
    ]
    [trajectory] = run(config, [row(agent_name=agent_name)], *answers)
    output = trajectory.output
    assert output.failure is None
    assert [s.origin for s in output.response_segments] == [Origin.MODEL, Origin.TOOL] * 2 + [Origin.MODEL]
    assert output.num_turns == 6
    template = hermes_template()
    assert '"name": "score_answer"' in template.decode(output.prompt_ids)
    first, second = (template.decode(output.response_segments[index].token_ids) for index in (1, 3))
    assert "Current parsed answer='41' reward=0.0" in first
    assert "777...(truncated)" in second


async def test_a_registered_parser_is_found_by_its_name() -> None:
    parser = verl.ToolParser.get_tool_parser("shouted", hermes_template().tokenizer)
    _, [call] = await parser.extract_tool_calls(encoded('CALL add {"a": 1}'))
    assert call == verl.FunctionCall(name="add", arguments='{"a": 1}')
    with pytest.raises(ConfigError, match=r"unknown tool parser; did you mean 'hermes'\?"):
        verl.ToolParser.get_tool_parser("hermse", hermes_template().tokenizer)


def test_a_completion_has_logprobs(config: Config) -> None:
    reply = ScriptedReply(text_reply("42").token_ids, logprobs=[-0.5] * len(text_reply("42").token_ids))
    output = run(config, [row(agent_name="one_shot_with_logprobs")], reply)[0].output
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
    [trajectory] = run(config, [row(tools_kwargs=tools_kwargs)], *answers)
    assert trajectory.output.tool_rewards == (-0.05, 0.0)
    assert trajectory.output.messages[2]["content"] == "Current parsed answer='41' reward=0.0"
    assert trajectory.reward == 1.0


def test_an_interaction_replies_until_the_answer_is_right(config: Config) -> None:
    interaction_kwargs = {"name": "patient", "query": "What is 6 * 7?", "ground_truth": "42"}
    answers = [text_reply("#### 41"), text_reply("#### 42")]
    [trajectory] = run(config, [row(interaction_kwargs=interaction_kwargs)], *answers)
    output = trajectory.output
    assert output.stop_reason is StopReason.INTERACTION_FINISHED
    assert output.turn_scores == (0.0, 1.0)
    assert output.feedback[0].extra == {"checked": "#### 41"}
    assert roles(output.messages) == ["user", "assistant", "user", "assistant", "user"]
    assert trajectory.reward == 1.0


def test_tools_and_interactions_load_by_their_functions() -> None:
    [loaded_tool] = verl.initialize_tools_from_config("tests/compat/tools.yaml")
    assert isinstance(loaded_tool.tool, verl_code.ScoreTool)
    assert loaded_tool.name == "score_answer"
    assert loaded_tool.get_openai_tool_schema().function.name == "score_answer"
    loaded = verl.initialize_interactions_from_config("tests/compat/interactions.yaml")
    assert isinstance(loaded["patient"], verl_code.PatientInteraction)


def test_a_custom_tool_loop_under_the_shipped_name_replaces_the_shipped_one(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    with pytest.warns(UserWarning, match="'tool_agent' was agent_loop.loops.tool_agent.ToolAgentLoop"):
        register("tool_agent")(verl_code.OneShotAgentLoop)
    [trajectory] = run(config, [row(agent_name="tool_agent")], text_reply("It is 42."))
    assert trajectory.output.metrics.generate_sequences > 0
    assert trajectory.output.num_turns == 2


@register("frugal")
class Frugal(ToolAgentLoop):
    """Tool loop with verl's constructor that overrides two handlers."""

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, **kwargs: Any) -> None:
        super().__init__(trainer_config, server_manager, tokenizer, **kwargs)
        self.max_calls = self.rollout_config.multi_turn.max_parallel_calls

    async def _handle_generating_state(self, agent_data: Any, sampling_params: dict[str, Any]) -> AgentState:
        assert isinstance(agent_data, AgentData)
        before = agent_data.prompt_ids
        state = await super()._handle_generating_state(agent_data, sampling_params)
        assert agent_data.prompt_ids == before + agent_data.response_ids
        text = self.tokenizer.decode(agent_data.response_ids)
        agent_data.extra_fields.setdefault("said", []).append(text)
        return state

    async def _handle_processing_tools_state(self, agent_data: Any) -> AgentState:
        agent_data.extra_fields["called"] = [call.name for call in agent_data.tool_calls]
        return await super()._handle_processing_tools_state(agent_data)


def test_a_handler_written_for_verl_reads_the_agent_data(config: Config) -> None:
    answers = [tool_call_reply("score_answer", answer="42"), text_reply("#### 42")]
    [trajectory] = run(config, [row(agent_name="frugal")], *answers)
    fields = trajectory.output.extra_fields
    assert trajectory.output.failure is None
    assert fields["called"] == ["score_answer"]
    assert fields["said"][1] == "#### 42<|im_end|>"
    assert fields["tool_rewards"] == list(trajectory.output.tool_rewards)
    assert fields["turn_scores"] == []


class Parrot(AsyncServerBase):
    """Server in verl's form that defines only `generate`."""

    def __init__(self, says: str = "It is 42.") -> None:
        self.says = says
        self.asked: list[Any] = []

    async def generate(  # pyright: ignore
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> list[int]:
        self.asked.append((prompt_ids, sampling_params))
        return encoded(self.says + "<|im_end|>")[: sampling_params["max_tokens"]]


TOOL_AGENT = RolloutConfig(n=2, temperature=0.7, agent=AgentConfig(default_agent_loop="tool_agent"))


@pytest.mark.virtual_time
async def test_a_server_that_defines_only_generate_runs_rollouts() -> None:
    servers = [Parrot(), Parrot()]
    async with AgentLoopManager(TOOL_AGENT, servers=servers, template=hermes_template()) as manager:
        trajectories = await manager.run([row()] * 2)
        with pytest.raises(WeightsError, match="Parrot does not define update_weights"):
            await manager.update_weights([], weight_version=1)
        assert [health.is_alive for health in await manager.server_manager.pool.health()] == [True, True]
    assert [t.output.answer for t in trajectories] == ["It is 42."] * 4
    assert servers[0].name != servers[1].name
    prompt_ids, params = servers[0].asked[0]
    assert isinstance(prompt_ids, list)
    assert params.items() >= {"temperature": 0.7, "top_p": 1.0, "repetition_penalty": 1.0}.items()


@pytest.mark.virtual_time
async def test_a_cancelled_request_ends_at_once_on_a_server_without_abort() -> None:
    class Slow(Parrot):
        async def generate(self, *args: Any, **kwargs: Any) -> list[int]:  # pyright: ignore
            await asyncio.sleep(3600)
            return []

    async with (
        AgentLoopManager(TOOL_AGENT, servers=[Slow()], template=hermes_template()) as manager,
        asyncio.TaskGroup() as group,
    ):
        running = group.create_task(manager.run([row()], n=1))
        await asyncio.sleep(1)
        manager.cancel_all()
    assert running.result()[0].output.stop_reason is StopReason.CANCELLED
    assert asyncio.get_running_loop().time() < 2


def test_a_server_that_defines_only_generate_is_created_from_a_configuration() -> None:
    overrides = ["rollout.engine=tests.compat.test_loops:Parrot", "rollout.engine_kwargs.says=Hello."]
    loaded = load_config(CONFIG, overrides=["actor_rollout_ref.rollout.name=scripted", *overrides])
    [server, *_] = create_servers(loaded.model, rollout=loaded.rollout)
    assert isinstance(server, verl.AsyncServerBase)
    assert (server.says, server.name) == ("Hello.", "Parrot-0")  # pyright: ignore


def test_checks_of_methods_that_a_server_lacks_are_skipped() -> None:
    report = run_virtual(check_server(Parrot(), max_model_len=128, vocab_size=300, timeout_s=5))
    skipped = {result.name for result in report.results if "does not define" in result.detail}
    assert "an aborted request returns the tokens sampled so far" in skipped
    assert "a server sleeps only without requests, refuses requests asleep, and wakes up unchanged" in skipped


def test_a_starlette_chat_request_returns_json_or_an_event_stream() -> None:
    server = Parrot()
    server.template = hermes_template()

    async def answer(request: Request) -> Any:
        return await server.chat_completion(request)

    client = TestClient(Starlette(routes=[Route("/chat", answer, methods=["POST"])]))
    body = {"model": "m", "messages": [{"role": "user", "content": "6 * 7?"}], "max_tokens": 50}
    reply = client.post("/chat", json=body)
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"] == "It is 42."
    streamed = client.post("/chat", json={**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert "42" in streamed.text


assert verl_code


def test_the_rule_of_a_row_scores_the_text_of_a_loop_on_token_ids() -> None:
    config, reward = load_config(), load_reward(RULES, timeout_s=10)
    truth = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "42"}}
    rows = [row(agent_name="one_shot_with_logprobs", **truth)]
    for answer, score in (("42", 1.0), ("41", 0.0)):
        [trajectory] = run(config, rows, text_reply(f"It is\n#### {answer}"), settings=config, reward=reward)
        assert trajectory.reward == score


def test_an_output_over_the_limit_is_cut_and_named_and_the_batch_goes_on() -> None:
    config = load_config(overrides=["rollout.response_length=24"])
    rows = [row(agent_name="one_shot_with_logprobs", times=times) for times in (20, 1)]
    long, short = run(config, rows, text_reply("#### 42"), settings=config)
    assert long.output.failure is None
    assert len(long.output.response_ids) == len(long.output.response_mask) == 24
    [incident] = [i for i in long.output.incidents if i.kind is IncidentKind.TRUNCATED_RESPONSE]
    assert "24" in incident.detail
    assert short.output.incidents == ()


def test_replies_in_the_format_of_gpt_oss_are_written_by_hand() -> None:
    text = build_gpt_oss_tool_response_text([{"content": "42"}], ["multiply"])
    assert text == (
        "<|start|>functions.multiply to=assistant<|channel|>commentary<|message|>42<|end|><|start|>assistant"
    )


ROOT = Path(__file__).parents[2]


def run_in(folder: Path, columns: dict[str, Any], *turns: ScriptedReply) -> AgentLoopOutput:
    config = RolloutConfig(
        prompt_length=512,
        response_length=512,
        agent=AgentConfig(agent_loop_config_path=str(folder / "loops.yaml")),
        multi_turn=MultiTurnConfig(tool_config_path=str(folder / "counter_tool.yaml")),
    )
    return run(config, [row(**columns)], *turns)[0].output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the code with the imports of this package."""
    tmp_path = tmp_path_factory.mktemp("code")
    for name in ("user_code.py", "loops.yaml", "counter_tool.yaml"):
        shutil.copy(ROOT / "tests" / "verl" / name, tmp_path)
    for file in tmp_path.glob("*.yaml"):
        text = file.read_text().replace("tests.verl.user_code.", f"{tmp_path / 'user_code.py'}:")
        file.write_text(text)
    page = (ROOT / "docs" / "from-verl.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^sed .*$", page, re.MULTILINE)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    return tmp_path


def test_a_loop_with_verls_imports_runs_after_the_command_of_the_page(folder: Path) -> None:
    output = run_in(folder, {"agent_name": "curious"}, text_reply("one"), text_reply("two"))
    assert output.failure is None
    template, mask = hermes_template(), output.response_mask.astype(bool)
    assert template.decode(output.response_ids) == "one<|im_end|>why?two<|im_end|>"
    assert template.decode(output.response_ids[mask]) == "one<|im_end|>two<|im_end|>"


def test_a_tool_with_verls_imports_runs_after_the_command_of_the_page(folder: Path) -> None:
    answers = [tool_call_reply("count", step=3), tool_call_reply("count", step=4), text_reply("done")]
    kwargs = {"count": {"create_kwargs": {"start": 10}}}
    output = run_in(folder, {"agent_name": "tool_agent", "tools_kwargs": kwargs}, *answers)
    assert output.failure is None
    replies = [str(m["content"]) for m in output.messages if m["role"] == "tool"]
    assert [reply.partition(" after")[0] for reply in replies] == ["count 13", "count 17"]


def test_an_import_of_verl_is_refused_with_the_module_to_import_from(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from verl.tools.base_tool import BaseTool\n")
    with pytest.raises(ConfigError, match="import verl's names from"):
        load_module(str(tmp_path / "mine.py"), key="reward.function")
