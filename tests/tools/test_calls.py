"""Limits of a tool's calls: concurrency, time and retries."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import ConfigError, ToolError, ToolUnavailable
from agent_loop.runtime.instances import OnReplay
from agent_loop.testing import run_virtual
from agent_loop.tools.base import BaseTool, ToolResponse, trajectory_of
from agent_loop.tools.function import function_tool
from agent_loop.tools.registry import load_tools
from agent_loop.tools.results import ToolResult
from agent_loop.tools.session import ToolSession, ToolSessionConfig
from agent_loop.trajectory import IncidentKind
from agent_loop.types import ToolCall

CONFIG = ToolSessionConfig(timeout_s=60, close_timeout_s=10)


class Service(BaseTool):
    """Tool that takes a second and is unavailable a given number of times."""

    def __init__(self, name: str = "service", *, faults: int = 0, seconds: float = 1.0) -> None:
        super().__init__(
            {}, {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        )
        self.faults = faults
        self.seconds = seconds
        self.created: list[str] = []
        self.released: list[str] = []
        self.num_calls = self.running = self.most_at_once = 0

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self.created.append(instance_id)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        self.num_calls += 1
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        if self.num_calls <= self.faults:
            raise ToolUnavailable("no answer")
        return ToolResponse(text="served"), None, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.released.append(instance_id)


def session_of(*tools: BaseTool) -> ToolSession:
    return ToolSession({tool.name: tool for tool in tools}, config=CONFIG)


def call_in_trajectories(tool: BaseTool, *, num: int) -> tuple[list[ToolResult], float]:
    """Run one call in each of several concurrent trajectories. Return the results and the duration."""

    async def main() -> tuple[list[ToolResult], float]:
        sessions = [session_of(tool) for _ in range(num)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(session.execute(ToolCall(tool.name, {}))) for session in sessions]
        for session in sessions:
            assert await session.close() == []
        return [task.result() for task in tasks], asyncio.get_running_loop().time()

    return run_virtual(main())


def kind_of(result: ToolResult) -> IncidentKind | None:
    return None if result.incident is None else result.incident.kind


def test_max_concurrent_limits_the_calls_of_all_trajectories() -> None:
    tool = Service()
    tool.max_concurrent = 3
    for _ in range(2):  # on one event loop after the other
        results, seconds = call_in_trajectories(tool, num=10)
        assert [kind_of(result) for result in results] == [None] * 10
        assert seconds == pytest.approx(4.0)
    assert tool.most_at_once == 3


def test_the_time_limit_of_a_call_begins_when_the_call_does() -> None:
    tool = Service()
    tool.max_concurrent, tool.timeout_s = 1, 1.5
    results, seconds = call_in_trajectories(tool, num=5)
    assert [kind_of(result) for result in results] == [None] * 5
    assert seconds == pytest.approx(5.0)


def test_a_cancelled_call_no_longer_counts_as_concurrent() -> None:
    tool = Service(seconds=1000)
    tool.max_concurrent, tool.timeout_s = 1, 2000

    async def main() -> None:
        first, second, third = (session_of(tool) for _ in range(3))
        running = asyncio.ensure_future(first.execute(ToolCall("service", {})))
        waiting = asyncio.ensure_future(second.execute(ToolCall("service", {})))
        await asyncio.sleep(1)
        running.cancel()
        waiting.cancel()
        await asyncio.wait({running, waiting})
        tool.seconds = 1
        assert (await third.execute(ToolCall("service", {}))).response.text == "served"
        for session in (first, second, third):
            await session.close()

    run_virtual(main())


def test_a_tools_own_time_limit_overrides_the_general_one() -> None:
    tool = Service(seconds=10)
    tool.timeout_s = 2
    [result], seconds = call_in_trajectories(tool, num=1)
    assert kind_of(result) is IncidentKind.TOOL_TIMEOUT
    assert result.response.text == "service took longer than 2 s and was stopped"
    assert seconds == pytest.approx(2.0)


def test_an_unavailable_call_is_retried_if_it_may_run_twice() -> None:
    tool = Service(faults=2)
    tool.on_replay, tool.retries = OnReplay.RECORDED, 2
    [result], seconds = call_in_trajectories(tool, num=1)
    assert (kind_of(result), result.response.text, tool.num_calls) == (None, "served", 3)
    assert seconds == pytest.approx(3.0 + 0.25 + 0.5)
    assert len(tool.created) == len(tool.released) == 1


def test_a_call_that_stays_unavailable_fails_with_the_number_of_attempts() -> None:
    tool = Service(faults=9)
    tool.on_replay, tool.retries = "recorded", 2
    [result], _ = call_in_trajectories(tool, num=1)
    assert kind_of(result) is IncidentKind.TOOL_UNAVAILABLE
    assert result.response.text == "no answer (tried 3 times)"


def test_a_tool_error_is_not_retried() -> None:
    num_calls = 0

    @function_tool
    def strict(a: int) -> int:
        """Refuses."""
        nonlocal num_calls
        num_calls += 1
        raise ToolError("no")

    strict.retries = 3

    async def main() -> ToolResult:
        session = session_of(strict)
        try:
            return await session.execute(ToolCall("strict", {"a": 1}))
        finally:
            await session.close()

    assert kind_of(run_virtual(main())) is IncidentKind.TOOL_ERROR
    assert num_calls == 1


@pytest.mark.parametrize("on_replay", [OnReplay.ONCE, OnReplay.RESTART, OnReplay.RERUN])
def test_a_call_that_may_not_be_run_twice_cannot_ask_for_retries(on_replay: OnReplay) -> None:
    tool = Service()
    tool.on_replay, tool.retries = on_replay, 1
    with pytest.raises(ConfigError, match="set retries to 0, or set on_replay to 'recorded'"):
        session_of(tool)


@pytest.mark.parametrize(
    ("name", "value"), [("retries", -1), ("max_concurrent", 0), ("timeout_s", 0), ("on_replay", "twice")]
)
def test_a_limit_out_of_range_is_refused(name: str, value: Any) -> None:
    tool = Service()
    session_of(tool)  # (a declaration may change between two trajectories)
    setattr(tool, name, value)
    with pytest.raises(ConfigError, match=name):
        session_of(tool)


def test_the_registry_overrides_the_limits_of_a_tool(tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"
    entry = "{class_name: calculator, timeout_s: 5, max_concurrent: 8, retries: 1}"
    path.write_text(f"tools: [{entry}]")
    tool = load_tools([], config_path=path)["calculator"]
    assert (tool.timeout_s, tool.max_concurrent, tool.retries) == (5.0, 8, 1)
    path.write_text(f"tools: [{entry.replace('retries: 1', 'retries: 1, on_replay: once')}]")
    with pytest.raises(ConfigError, match="has retries=1 but on_replay='once'"):
        load_tools([], config_path=path)
    path.write_text(f"tools: [{entry.replace('retries', 'retires')}]")
    with pytest.raises(ConfigError, match="did you mean 'retries'"):
        load_tools([], config_path=path)


def test_a_function_may_create_several_tools_from_one_entry(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from tests.tools.test_calls import Service\n"
        "def make(config):\n"
        "    return [Service(name) for name in config['names']]\n"
    )
    path = tmp_path / "tools.yaml"
    path.write_text(
        f"tools: [{{class_name: '{tmp_path}/mine.py:make', config: {{names: [a, b]}}, timeout_s: 3}}]"
    )
    tools = load_tools([], config_path=path)
    assert {name: tool.timeout_s for name, tool in tools.items()} == {"a": 3.0, "b": 3.0}
    path.write_text(f"tools: [{{class_name: '{tmp_path}/mine.py:make', config: {{names: []}}}}]")
    with pytest.raises(ConfigError, match="return a list of BaseTool objects"):
        load_tools([], config_path=path)


def test_instance_ids_identify_their_trajectory() -> None:
    first, second = Service("first"), Service("second")

    async def main() -> None:
        for session in [session_of(first, second), session_of(first, second)]:
            for name in ("first", "second"):
                await session.execute(ToolCall(name, {}))
            await session.close()

    run_virtual(main())
    assert [trajectory_of(i) for i in first.created] == [trajectory_of(i) for i in second.created]
    assert len({*first.created, *second.created}) == 4
    assert len({trajectory_of(i) for i in first.created}) == 2
