"""Tests of pydantic-ai with its OpenAI models, on chat completions and the Responses API, and its Anthropic model."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pydantic_ai
import pytest
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from agent_loop.servers.base import Ability
from tests.agents.frameworks import ONE_TOOL_TURN, SUM, Recorded, Sum, run_framework
from tests.helpers import call_text
from tests.serve.harness import origins

pytestmark = pytest.mark.agents
APIS = ["chat", "responses", "anthropic"]

ADD = call_text("add", a=1, b=2)
THE_SUM = Sum(total=3, note="as asked")
RESULT = call_text("final_result", total=3, note="as asked")
FORCED_TURNS = ["prompt", "prefix", "model", "tool", "prefix", "model"]
"""Origins of a conversation in which each turn has to call a tool, and the last call is the result."""


@asynccontextmanager
async def model_of(api: str, base_url: str, anthropic_base_url: str, api_key: str) -> AsyncGenerator[Any]:
    """Yield the model that uses an API of the gateway."""
    if api == "anthropic":
        async with anthropic.AsyncAnthropic(base_url=anthropic_base_url, api_key=api_key) as client:
            yield AnthropicModel("claude", provider=AnthropicProvider(anthropic_client=client))
        return
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        yield kind("gpt", provider=OpenAIProvider(openai_client=client))


def run_agent(
    api: str,
    *texts: str,
    output: Any = str,
    expected: Any,
    stream: bool = False,
    tools: bool = True,
    **how: Any,
) -> Recorded:
    """Run an agent with an adding tool, check its output, and return what is recorded."""
    calls: list[int] = []

    async def program(row: Any, *, base_url: str, anthropic_base_url: str, api_key: str) -> None:
        async with model_of(api, base_url, anthropic_base_url, api_key) as model:
            agent = pydantic_ai.Agent(model, instructions="Add.", output_type=output)
            if tools:
                agent.tool_plain(add)
            if stream:
                async with agent.run_stream("1 + 2?") as result:
                    assert await result.get_output() == expected
            else:
                assert (await agent.run("1 + 2?")).output == expected

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        calls.append(a + b)
        return a + b

    recorded = run_framework(program, *texts, **how)
    assert calls == [3] * tools
    return recorded


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_an_agent_with_a_tool_is_one_trajectory(api: str, stream: bool) -> None:
    recorded = run_agent(api, ADD, "It is 3.", expected="It is 3.", stream=stream)
    assert origins(recorded.output) == ONE_TOOL_TURN


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_an_output_type_as_a_tool_forces_a_call_in_each_turn(api: str, stream: bool) -> None:
    recorded = run_agent(api, ADD, RESULT, output=Sum, expected=THE_SUM, stream=stream)
    assert origins(recorded.output) == FORCED_TURNS
    assert recorded.dropped == []


@pytest.mark.parametrize("api", APIS)
def test_an_answer_that_does_not_fit_is_asked_for_again_in_the_same_conversation(api: str) -> None:
    wrong = call_text("final_result", total="three")
    recorded = run_agent(api, wrong, RESULT, output=Sum, expected=THE_SUM, tools=False)
    assert origins(recorded.output) == FORCED_TURNS
    assert "valid integer" in recorded.prompts[1]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_native_output_is_constrained_by_the_server(api: str) -> None:
    output, abilities = pydantic_ai.NativeOutput(Sum), [Ability.JSON_SCHEMA]
    recorded = run_agent(api, SUM, output=output, expected=THE_SUM, tools=False, abilities=abilities)
    assert origins(recorded.output) == ["prompt", "model"]
    assert recorded.dropped == []


@pytest.mark.parametrize("mode", [pydantic_ai.NativeOutput, pydantic_ai.PromptedOutput])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_native_or_prompted_output_with_tools_is_one_trajectory(api: str, mode: Any) -> None:
    recorded = run_agent(api, ADD, SUM, output=mode(Sum), expected=THE_SUM)
    assert origins(recorded.output) == ONE_TOOL_TURN
    assert recorded.dropped == ["response_format"]


def test_a_prompted_output_over_the_messages_api_is_one_trajectory() -> None:
    recorded = run_agent("anthropic", ADD, SUM, output=pydantic_ai.PromptedOutput(Sum), expected=THE_SUM)
    assert origins(recorded.output) == ONE_TOOL_TURN


@pytest.mark.parametrize("api", APIS)
def test_a_second_run_with_the_history_continues_the_conversation(api: str) -> None:
    async def program(row: Any, *, base_url: str, anthropic_base_url: str, api_key: str) -> None:
        async with model_of(api, base_url, anthropic_base_url, api_key) as model:
            agent = pydantic_ai.Agent(model, instructions="Talk.")
            first = await agent.run("One?")
            second = await agent.run("Two?", message_history=first.all_messages())
            assert (first.output, second.output) == ("one", "two")

    recorded = run_framework(program, "one", "two")
    assert origins(recorded.output) == ["prompt", "model", "interaction", "model"]
