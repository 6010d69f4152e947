"""Tests of an unmodified LangGraph graph with another base URL."""

from __future__ import annotations

import asyncio

from examples.langgraph_math.agent import solve
from tests.helpers import text_reply, tool_call_reply
from tests.serve.harness import ProgramHarness, origins


def test_a_graph_with_tools_is_one_trajectory_per_row() -> None:
    replies = [
        tool_call_reply("calculate", a=1, b=2, operand="@"),
        tool_call_reply("calculate", a=-1, b=3, operand="+"),
        text_reply("2"),
    ]
    harness = ProgramHarness(lambda request: replies[request.turn])
    outputs = [t.output for t in asyncio.run(harness.run(*[solve] * 16))]
    assert [output.failure for output in outputs] == [None] * 16
    for output in outputs:
        assert origins(output) == ["prompt", "model", "tool", "model", "tool", "model"]
        assert [m["content"] for m in output.messages if m["role"] == "tool"] == ["-1", "2"]
