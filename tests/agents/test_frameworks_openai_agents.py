"""Tests of the OpenAI Agents SDK with its defaults, on the Responses API and on chat completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import agents as sdk
import openai
import pytest

from agent_loop.servers.base import Ability
from tests.agents.frameworks import ONE_TOOL_TURN, SUM, Recorded, Sum, run_framework
from tests.helpers import call_text
from tests.serve.harness import origins

pytestmark = [pytest.mark.agents, pytest.mark.parametrize("api", ["responses", "chat"])]

ADD = call_text("add", a=1, b=2)
THE_SUM = Sum(total=3, note="as asked")


class Calls:
    """An adding tool that counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

        def add(a: int, b: int) -> int:
            """Add two numbers."""
            self.num_calls += 1
            return a + b

        self.tool = sdk.function_tool(add)


@asynccontextmanager
async def settings(api: str, base_url: str, api_key: str) -> AsyncGenerator[Any]:
    """Yield the settings that point the SDK at the gateway."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        provider = sdk.OpenAIProvider(openai_client=client, use_responses=api == "responses")
        yield sdk.RunConfig(model_provider=provider, tracing_disabled=True)


def run_agent(make: Callable[[], Any], *texts: str, api: str, expected: Any, **how: Any) -> Recorded:
    """Run an agent, check its output, and return what is recorded."""

    async def program(row: Any, *, base_url: str, api_key: str) -> None:
        async with settings(api, base_url, api_key) as run_config:
            result = await sdk.Runner.run(make(), "1 + 2?", run_config=run_config)
        assert result.final_output == expected

    return run_framework(program, *texts, **how)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_with_a_tool_is_one_trajectory(api: str, stream: bool) -> None:
    calls = Calls()

    async def program(row: Any, *, base_url: str, api_key: str) -> float:
        agent = sdk.Agent(name="adder", instructions="Add.", tools=[calls.tool])
        async with settings(api, base_url, api_key) as run_config:
            if stream:
                result = sdk.Runner.run_streamed(agent, "1 + 2?", run_config=run_config)
                names = [event.name async for event in result.stream_events() if hasattr(event, "name")]
                assert names == ["tool_called", "tool_output", "message_output_created"]
            else:
                result = await sdk.Runner.run(agent, "1 + 2?", run_config=run_config)
        assert result.final_output == "It is 3."
        return 1.0

    recorded = run_framework(program, ADD, "It is 3.")
    assert origins(recorded.output) == ONE_TOOL_TURN
    assert calls.num_calls == 1
    assert recorded.output.reward_score == 1.0


def test_parallel_calls_are_answered_in_one_turn(api: str) -> None:
    calls, turn = Calls(), "Both." + ADD + call_text("add", a=3, b=4)
    recorded = run_agent(
        lambda: sdk.Agent(name="adder", tools=[calls.tool]), turn, "3 and 7", api=api, expected="3 and 7"
    )
    assert origins(recorded.output) == ONE_TOOL_TURN
    assert [m["content"] for m in recorded.output.messages if m["role"] == "tool"] == ["3", "7"]
    assert calls.num_calls == 2


def test_an_output_type_is_enforced_where_the_server_can(api: str) -> None:
    recorded = run_agent(
        lambda: sdk.Agent(name="adder", output_type=Sum),
        SUM,
        api=api,
        expected=THE_SUM,
        abilities=[Ability.JSON_SCHEMA],
    )
    assert origins(recorded.output) == ["prompt", "model"]
    assert "response_format" not in recorded.dropped


@pytest.mark.parametrize("abilities", [(), (Ability.JSON_SCHEMA,)])
def test_an_output_type_with_tools_is_one_trajectory(api: str, abilities: Iterable[Ability]) -> None:
    calls = Calls()
    recorded = run_agent(
        lambda: sdk.Agent(name="adder", tools=[calls.tool], output_type=Sum),
        ADD,
        SUM,
        api=api,
        expected=THE_SUM,
        abilities=abilities,
    )
    assert origins(recorded.output) == ONE_TOOL_TURN
    assert recorded.dropped.count("response_format") == 1
    assert calls.num_calls == 1


def poet() -> Any:
    return sdk.Agent(name="poet", instructions="Rhyme.")


def test_a_handoff_is_a_conversation_of_its_own(api: str) -> None:
    recorded = run_agent(
        lambda: sdk.Agent(name="front", instructions="Hand over.", handoffs=[poet()]),
        call_text("transfer_to_poet"),
        "fox, box",
        api=api,
        expected="fox, box",
    )
    assert [origins(output) for output in recorded.outputs] == [["prompt", "model"]] * 2
    assert "Hand over." in recorded.prompts[0]
    assert "Rhyme." in recorded.prompts[1]


def test_an_agent_as_a_tool_of_another_is_a_conversation_of_its_own(api: str) -> None:
    def front() -> Any:
        tool = poet().as_tool(tool_name="rhyme", tool_description="Find a rhyme.")
        return sdk.Agent(name="front", instructions="Ask the poet.", tools=[tool])

    turns = [call_text("rhyme", input="fox"), "box", "It is box."]
    recorded = run_agent(front, *turns, api=api, expected="It is box.")
    assert [origins(output) for output in recorded.outputs] == [ONE_TOOL_TURN, ["prompt", "model"]]


def test_a_session_of_the_sdk_continues_the_conversation(api: str) -> None:
    async def program(row: Any, *, base_url: str, api_key: str) -> None:
        agent, memory = sdk.Agent(name="talker"), sdk.SQLiteSession("talk")
        async with settings(api, base_url, api_key) as run_config:
            for question in ("One?", "Two?"):
                await sdk.Runner.run(agent, question, run_config=run_config, session=memory)
        memory.close()

    recorded = run_framework(program, "one", "two")
    assert origins(recorded.output) == ["prompt", "model", "interaction", "model"]
