"""Tests of LangChain's `create_agent` and LangGraph's `create_react_agent`, with the models of OpenAI and Anthropic."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

from agent_loop.servers.base import Ability
from tests.agents.frameworks import ONE_TOOL_TURN, SUM, Recorded, Sum, run_framework
from tests.helpers import call_text
from tests.serve.harness import origins

pytestmark = [pytest.mark.agents, pytest.mark.filterwarnings("ignore:create_react_agent has been moved")]
APIS = ["chat", "responses", "anthropic"]

ADD = call_text("add", a=1, b=2)
RESULT = call_text("Sum", total=3, note="as asked")
FORCED_TURNS = ["prompt", "prefix", "model", "tool", "prefix", "model"]


def model_of(api: str, base_url: str, anthropic_base_url: str, api_key: str) -> Any:
    """Return the model that uses an API of the gateway."""
    if api == "anthropic":
        return ChatAnthropic(model="claude", base_url=anthropic_base_url, api_key=api_key)
    return ChatOpenAI(
        model="gpt", base_url=base_url, api_key=api_key, use_responses_api=api == "responses" or None
    )


def run_agent(
    api: str,
    *texts: str,
    output: Any = None,
    prebuilt: bool = False,
    stream: bool = False,
    tools: bool = True,
    **how: Any,
) -> Recorded:
    """Run an agent with an adding tool, check its answer, and return what is recorded."""
    calls: list[int] = []

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        calls.append(a + b)
        return a + b

    async def program(row: Any, *, base_url: str, anthropic_base_url: str, api_key: str) -> None:
        model = model_of(api, base_url, anthropic_base_url, api_key)
        create = create_react_agent if prebuilt else create_agent
        agent = create(model, [add] if tools else [], response_format=output)
        question = {"messages": [("user", "1 + 2?")]}
        if stream:
            parts = [part async for part, _ in agent.astream(question, stream_mode="messages")]
            assert "".join(part.text for part in parts if "AI" in type(part).__name__) == "It is 3."
            return
        state = await agent.ainvoke(question)
        if output is None:
            assert state["messages"][-1].text == "It is 3."
        else:
            assert state["structured_response"] == Sum(total=3, note="as asked")

    recorded = run_framework(program, *texts, **how)
    assert calls == [3] * tools
    return recorded


@pytest.mark.parametrize("prebuilt", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_an_agent_with_a_tool_is_one_trajectory(api: str, stream: bool, prebuilt: bool) -> None:
    recorded = run_agent(api, ADD, "It is 3.", stream=stream, prebuilt=prebuilt)
    assert origins(recorded.output) == ONE_TOOL_TURN


@pytest.mark.parametrize("output", [Sum, ToolStrategy(Sum)])
@pytest.mark.parametrize("api", APIS)
def test_a_response_format_as_a_tool_forces_a_call_in_each_turn(api: str, output: Any) -> None:
    recorded = run_agent(api, ADD, RESULT, output=output)
    assert origins(recorded.output) == FORCED_TURNS
    assert recorded.dropped == []


@pytest.mark.parametrize("api", APIS)
def test_a_response_format_of_the_provider_is_constrained_by_the_server(api: str) -> None:
    recorded = run_agent(api, SUM, output=ProviderStrategy(Sum), tools=False, abilities=[Ability.JSON_SCHEMA])
    assert origins(recorded.output) == ["prompt", "model"]
    assert recorded.dropped == []


@pytest.mark.parametrize("api", APIS)
def test_a_response_format_of_the_provider_with_tools_is_one_trajectory(api: str) -> None:
    recorded = run_agent(api, ADD, SUM, output=ProviderStrategy(Sum))
    assert origins(recorded.output) == ONE_TOOL_TURN
    assert recorded.dropped == ["response_format"]


def test_the_structured_response_of_the_prebuilt_agent_is_a_conversation_of_its_own() -> None:
    recorded = run_agent(
        "chat", ADD, "It is 3.", SUM, output=Sum, prebuilt=True, abilities=[Ability.JSON_SCHEMA]
    )
    assert [origins(output) for output in recorded.outputs] == [ONE_TOOL_TURN, ["prompt", "model"]]
    assert "It is 3." in recorded.prompts[2]
