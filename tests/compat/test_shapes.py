"""Interfaces that verl documents: loops, handlers of the tool loop, servers, sampling parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.testclient import TestClient

from agent_loop.checks import check_server
from agent_loop.config import Config, RolloutConfig, load_config
from agent_loop.errors import WeightsError
from agent_loop.integrations import verl
from agent_loop.integrations.verl import (
    AgentData,
    AgentLoopBase,
    AgentLoopOutput,
    AgentState,
    AsyncPartialToolAgentLoop,
    AsyncServerBase,
    SingleTurnAgentLoop,
    ToolAgentLoop,
    register,
    simple_timer,
)
from agent_loop.loops import registry
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.factory import create_servers
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row, StopReason
from tests.helpers import encoded, hermes_template, text_reply, tool_call_reply

CONFIG = "tests/compat/config.yaml"


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(CONFIG)


def row(**columns: Any) -> dict[str, Any]:
    return {"raw_prompt": [{"role": "user", "content": "What is 6 * 7?"}], **columns}


def run(config: Config, rows: Sequence[Row], answers: Sequence[ScriptedReply]) -> list[Trajectory]:
    async def main() -> list[Trajectory]:
        servers = [ScriptedServer(lambda request: answers[request.turn])]
        async with AgentLoopManager(config.rollout, servers=servers, template=hermes_template()) as manager:
            return await manager.run(rows, n=1)

    return run_virtual(main())


@register("one_question")
class OneQuestion(AgentLoopBase):
    """Single-turn loop of verl's first versions: the configuration as first argument, and messages instead of
    columns."""

    def __init__(self, config: Any, server_manager: Any, tokenizer: Any) -> None:
        super().__init__(config, server_manager, tokenizer)
        self.prompt_length = config.actor_rollout_ref.rollout.prompt_length
        self.response_length = config.actor_rollout_ref.rollout.response_length

    async def run(self, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> AgentLoopOutput:
        metrics: dict[str, float] = {}
        prompt_ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True),
        )
        with simple_timer("generate_sequences", metrics):
            response_ids = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids[: self.response_length],
            response_mask=[1] * len(response_ids[: self.response_length]),
            num_turns=2,
            metrics=metrics,
        )


def test_the_first_form_of_a_single_turn_loop_runs_and_can_be_rewarded(config: Config) -> None:
    [trajectory] = run(config, [row(agent_name="one_question")], [text_reply("It is 42.")])
    output = trajectory.output
    assert output.failure is None
    assert output.answer == "It is 42."
    assert output.response_logprobs is not None
    assert output.metrics.model_dump()["generate_sequences"] > 0


def test_a_custom_tool_loop_under_the_shipped_name_replaces_the_shipped_one(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    with pytest.warns(
        UserWarning, match="agent loop 'tool_agent' was agent_loop.loops.tool_agent.ToolAgentLoop"
    ):
        register("tool_agent")(OneQuestion)
    [trajectory] = run(config, [row(agent_name="tool_agent")], [text_reply("It is 42.")])
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
    [trajectory] = run(config, [row(agent_name="frugal")], answers)
    fields = trajectory.output.extra_fields
    assert trajectory.output.failure is None
    assert fields["called"] == ["score_answer"]
    assert fields["said"][1] == "#### 42<|im_end|>"
    assert fields["tool_rewards"] == list(trajectory.output.tool_rewards)
    assert fields["turn_scores"] == []


@pytest.mark.parametrize("base", [SingleTurnAgentLoop, ToolAgentLoop, AsyncPartialToolAgentLoop])
def test_a_subclass_of_each_shipped_loop_takes_verls_constructor(base: Any, config: Config) -> None:
    class Own(base):
        def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, **kwargs: Any) -> None:
            super().__init__(trainer_config, server_manager, tokenizer, **kwargs)

    register("own_shipped")(Own)
    [trajectory] = run(config, [row(agent_name="own_shipped")], [text_reply("It is 42.")])
    assert trajectory.output.answer == "It is 42."


def test_sampling_params_hold_the_documented_keys(config: Config) -> None:
    seen: list[dict[str, Any]] = []

    @register("curious")
    class Curious(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            seen.append(dict(sampling_params))
            raise ValueError("seen")

    rollout = config.rollout.model_copy(update={"max_failed_share": 1.0})
    run(config.model_copy(update={"rollout": rollout}), [row(agent_name="curious")], [])
    assert seen[0]["temperature"] == 0.7
    assert seen[0]["top_p"] == 0.9
    assert seen[0]["repetition_penalty"] == 1.0


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


def test_a_server_that_defines_only_generate_runs_rollouts() -> None:
    async def main() -> list[Trajectory]:
        config = RolloutConfig(n=2, agent={"default_agent_loop": "tool_agent"})  # pyright: ignore
        async with AgentLoopManager(config, servers=servers, template=hermes_template()) as manager:
            trajectories = await manager.run([row()] * 2)
            with pytest.raises(WeightsError, match="Parrot does not define update_weights"):
                await manager.update_weights([], weight_version=1)
            assert [health.is_alive for health in await manager.server_manager.pool.health()] == [True, True]
            return trajectories

    servers = [Parrot(), Parrot()]
    trajectories = run_virtual(main())
    assert [t.output.answer for t in trajectories] == ["It is 42."] * 4
    assert servers[0].name != servers[1].name
    prompt_ids, params = servers[0].asked[0]
    assert isinstance(prompt_ids, list)
    assert {"temperature", "top_p", "repetition_penalty"} <= set(params)


def test_a_cancelled_request_ends_at_once_on_a_server_without_abort() -> None:
    class Slow(Parrot):
        async def generate(  # pyright: ignore
            self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
        ) -> list[int]:
            await asyncio.sleep(3600)
            return []

    async def main() -> tuple[Trajectory, float]:
        config = RolloutConfig(n=1, agent={"default_agent_loop": "tool_agent"})  # pyright: ignore
        async with AgentLoopManager(config, servers=[Slow()], template=hermes_template()) as manager:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(manager.run([row()]))
                await asyncio.sleep(1)
                manager.cancel_all()
            return running.result()[0], asyncio.get_running_loop().time()

    trajectory, ended_at = run_virtual(main())
    assert trajectory.output.stop_reason is StopReason.CANCELLED
    assert ended_at < 2


def test_a_server_that_defines_only_generate_is_created_from_a_configuration(config: Config) -> None:
    overrides = ["rollout.engine=tests.compat.test_shapes:Parrot", "rollout.engine_kwargs.says=Hello."]
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
