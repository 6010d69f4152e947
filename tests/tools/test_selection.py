from __future__ import annotations

from typing import Any

import pytest

from agent_loop.config import RolloutConfig
from agent_loop.errors import DataError
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.tools.registry import with_row_columns
from agent_loop.trajectory import IncidentKind
from tests.helpers import hermes_template, text_reply, tool_call_reply, user
from tests.rollout.harness import Adder, WorkerHarness


def test_a_row_sees_and_calls_only_its_selected_tools() -> None:
    chosen, other = Adder(name="chosen"), Adder(name="other")
    script = [tool_call_reply("other", a=1, b=2), tool_call_reply("chosen", a=1, b=2), text_reply("3")]
    trajectory = WorkerHarness(script, tools=[other, chosen]).run_one(
        tool_selection=["chosen"], tools_kwargs={"other": {"create_kwargs": {"x": 1}}, "chosen": None}
    )
    output = trajectory.output
    assert [schema["function"]["name"] for schema in output.tool_schemas] == ["chosen"]
    assert [incident.kind for incident in output.incidents] == [IncidentKind.UNKNOWN_TOOL]
    assert (other.num_created, chosen.num_created) == (0, 1)
    assert [m["content"] for m in output.messages if m["role"] == "tool"] == [
        "there is no tool 'other'; there are: chosen",
        "3",
    ]


@pytest.mark.parametrize(("selection", "num_tools"), [(None, 2), ([], 0), (("b", "a"), 2)])
def test_none_selects_all_tools_and_an_empty_list_selects_none(selection: Any, num_tools: int) -> None:
    harness = WorkerHarness([text_reply("hello")], tools=[Adder(name="a"), Adder(name="b")])
    output = harness.run_one(tool_selection=selection).output
    assert len(output.tool_schemas) == num_tools


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (
            "tool_selection",
            ["calculater"],
            "row 1: tool_selection: there is no tool 'calculater'; did you mean",
        ),
        ("tool_selection", "calculator", "give a list of tool names"),
        ("tool_selection", [3], "give a list of tool names"),
        ("tool_selection", ["calculator", "calculator"], "list each tool once"),
        ("tools_kwargs", {"calculater": {}}, "row 1: tools_kwargs: there is no 'calculater'"),
    ],
)
def test_an_unknown_tool_in_a_row_is_an_error_before_any_work(column: str, value: Any, message: str) -> None:
    server = ScriptedServer([text_reply("hello")])
    config = RolloutConfig.model_validate({"multi_turn": {"tools": ["calculator"]}})

    async def main() -> None:
        async with AgentLoopManager(config, servers=[server], template=hermes_template()) as manager:
            rows = [{"raw_prompt": user("?")}, {"raw_prompt": user("?"), column: value}]
            with pytest.raises(DataError, match=message):
                await manager.run(rows, n=1)

    run_virtual(main())
    assert server.num_sessions == 0


def test_a_tool_gets_the_columns_that_it_asks_for() -> None:
    tool, other = Adder(name="tool"), Adder(name="other")
    tool.row_columns = ["place", "absent"]
    given = {"tool": {"create_kwargs": {"a": 1}}, "other": {"create_kwargs": {"b": 2}}}
    tools = {"tool": tool, "other": other}
    assert with_row_columns(given, tools=tools, row={"place": "x", "more": 1, "absent": None}) == {
        "tool": {"create_kwargs": {"a": 1, "place": "x"}},
        "other": {"create_kwargs": {"b": 2}},
    }
    own = {"tool": {"create_kwargs": {"place": "own"}}}
    assert with_row_columns(own, tools=tools, row={"place": "x"}) == own
