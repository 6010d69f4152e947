"""Tests of scripts that do not know of the gateway: they find it by the variables that all clients read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.agents.frameworks import ONE_TOOL_TURN, run_framework
from tests.helpers import call_text
from tests.serve.harness import origins

pytestmark = pytest.mark.agents

OPENAI_AGENTS = """
from agents import Agent, Runner, function_tool

@function_tool
def add(a: int, b: int) -> int:
    return a + b

result = Runner.run_sync(Agent(name="adder", tools=[add]), "1 + 2?")
assert result.final_output == "It is 3.", result.final_output
"""

SMOLAGENTS = """
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

@tool
def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: The first.
        b: The second.
    '''
    return a + b

agent = ToolCallingAgent(tools=[add], model=OpenAIServerModel("gpt"))
assert agent.run("1 + 2?") == "It is 3."
"""

PYDANTIC_AI = """
from pydantic_ai import Agent

agent = Agent("MODEL")

@agent.tool_plain
def add(a: int, b: int) -> int:
    return a + b

assert agent.run_sync("1 + 2?").output == "It is 3."
"""

LANGCHAIN = """
from langchain.agents import create_agent

def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

state = create_agent("MODEL", [add]).invoke({"messages": [("user", "1 + 2?")]})
assert state["messages"][-1].text == "It is 3."
"""

ANSWER = "It is 3."
FINAL_ANSWER = call_text("final_answer", answer=ANSWER)
STEP = ["prompt", "prefix", "model"]


SCRIPTS = {
    "openai-agents": ("agents", OPENAI_AGENTS, ANSWER, [ONE_TOOL_TURN]),
    "smolagents": ("smolagents", SMOLAGENTS, FINAL_ANSWER, [STEP, STEP]),
    **{
        f"{package} {model}": (package, script.replace("MODEL", model), ANSWER, [ONE_TOOL_TURN])
        for package, script, models in (
            ("pydantic_ai", PYDANTIC_AI, ("openai:gpt", "openai-chat:gpt", "anthropic:claude")),
            ("langchain", LANGCHAIN, ("openai:gpt", "anthropic:claude")),
        )
        for model in models
    },
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_a_framework_runs_unchanged(name: str, tmp_path: Path) -> None:
    package, script, last, expected = SCRIPTS[name]
    pytest.importorskip(package)
    file = tmp_path / "agent.py"
    file.write_text(script)
    recorded = run_framework(
        "-",
        call_text("add", a=1, b=2),
        last,
        command=[sys.executable, str(file)],
        env={"OPENAI_AGENTS_DISABLE_TRACING": "1"},
    )
    assert [origins(output) for output in recorded.outputs] == expected
