"""Tests of smolagents, and of scripts that find the gateway by the variables that all clients read.

smolagents writes the calls of earlier steps as text, and their results as messages of the user. So each step is a
conversation of its own, which has the earlier steps in its prompt as the model saw them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import smolagents

from tests.agents.frameworks import ONE_TOOL_TURN, Recorded, run_framework
from tests.helpers import call_text, hermes_template
from tests.serve.harness import origins

pytestmark = pytest.mark.agents


class Add(smolagents.Tool):
    """An adding tool that counts its calls."""

    name = "add"
    description = "Add two numbers."
    inputs = {name: {"type": "integer", "description": "a number"} for name in "ab"}  # noqa: RUF012
    output_type = "integer"
    num_calls = 0

    def forward(self, a: int, b: int) -> int:
        self.num_calls += 1
        return a + b


def run_agent(*texts: str, kind: str, expected: Any, stream: bool = False, **how: Any) -> Recorded:
    """Run an agent with an adding tool, check its answer, and return what is recorded."""
    tool = Add()

    def program(row: Any, *, base_url: str, api_key: str) -> None:
        model = smolagents.OpenAIServerModel("gpt", api_base=base_url, api_key=api_key)
        options = {"stream_outputs": True} if stream else {}
        agent = getattr(smolagents, kind)(tools=[tool], model=model, verbosity_level=0, **options)
        assert agent.run("1 + 2?") == expected
        model.client.close()

    recorded = run_framework(program, *texts, **how)
    assert tool.num_calls == 1
    return recorded


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_calling_agent_forces_a_call_in_each_step(stream: bool) -> None:
    turns = [call_text("add", a=1, b=2), call_text("final_answer", answer="It is 3.")]
    recorded = run_agent(*turns, kind="ToolCallingAgent", expected="It is 3.", stream=stream)
    assert [origins(output) for output in recorded.outputs] == [["prompt", "prefix", "model"]] * 2
    assert "Observation:\n3" in recorded.prompts[1]
    assert recorded.dropped == []


def test_the_code_of_a_code_agent_ends_at_its_stop_text() -> None:
    step = "Thought: I add.\n<code>\ntotal = add(1, 2)\nprint(total)\n</code>"
    last = "Thought: Done.\n<code>\nfinal_answer(total)\n</code>"
    recorded = run_agent(step, last, kind="CodeAgent", expected=3, has_stops=True)
    for output, text in zip(recorded.outputs, [step, last], strict=True):
        assert hermes_template().decode(output.response_ids) == text
    assert [origins(output) for output in recorded.outputs] == [["prompt", "model"]] * 2
    assert "Execution logs:\n3" in recorded.prompts[1]


OPENAI_AGENTS = """
from agents import Agent, Runner, function_tool

@function_tool
def add(a: int, b: int) -> int:
    return a + b

result = Runner.run_sync(Agent(name="adder", tools=[add]), "1 + 2?")
assert result.final_output == "It is 3.", result.final_output
"""

PYDANTIC_AI = """
from pydantic_ai import Agent

agent = Agent("MODEL")

@agent.tool_plain
def add(a: int, b: int) -> int:
    return a + b

assert agent.run_sync("1 + 2?").output == "It is 3."
"""


SCRIPTS = {
    "agents": OPENAI_AGENTS,
    **{
        f"pydantic_ai {model}": PYDANTIC_AI.replace("MODEL", model)
        for model in ("openai:gpt", "openai-chat:gpt", "anthropic:claude")
    },
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_a_framework_runs_unchanged(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name.partition(" ")[0])
    file = tmp_path / "agent.py"
    file.write_text(SCRIPTS[name])
    recorded = run_framework(
        "-",
        call_text("add", a=1, b=2),
        "It is 3.",
        command=[sys.executable, str(file)],
        env={"OPENAI_AGENTS_DISABLE_TRACING": "1"},
    )
    assert origins(recorded.output) == ONE_TOOL_TURN
