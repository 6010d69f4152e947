import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agent_loop.errors import ConfigError, DataError, EpisodeError, ToolBug, ToolError
from agent_loop.testing import run_virtual
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.function import function_tool
from agent_loop.tools.results import ToolResult
from agent_loop.tools.session import ToolSession, ToolSessionConfig
from agent_loop.trajectory import IncidentKind
from agent_loop.types import ToolCall

CONFIG = ToolSessionConfig(timeout_s=60, close_timeout_s=10)


def schema(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


async def hang() -> None:
    await asyncio.Event().wait()


class Notebook(BaseTool):
    """Tool that logs its calls. Each stage can run a given function."""

    def __init__(self, name: str = "notebook", **stages: Callable[..., Any]) -> None:
        super().__init__({}, schema(name))
        self.log: list[tuple[str, str, dict[str, Any]]] = []
        self.stages = stages

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        await self.pass_stage("create", instance_id, kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        result = await self.pass_stage("execute", instance_id, kwargs)
        return (ToolResponse(text=parameters.get("text", "")), None, {}) if result is None else result

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return await self.pass_stage("calc_reward", instance_id, kwargs)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self.pass_stage("release", instance_id, kwargs)

    async def pass_stage(self, stage: str, instance_id: str, kwargs: dict[str, Any]) -> Any:
        self.log.append((stage, instance_id, kwargs))
        result = self.stages[stage]() if stage in self.stages else None
        return await result if asyncio.iscoroutine(result) else result

    @property
    def events(self) -> list[str]:
        return [stage for stage, _, _ in self.log]


def session_of(*tools: BaseTool, **tools_kwargs: Any) -> ToolSession:
    return ToolSession({tool.name: tool for tool in tools}, config=CONFIG, tools_kwargs=tools_kwargs)


def call(name: str = "notebook", **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def raising(error: BaseException) -> Callable[[], Any]:
    def stage() -> Any:
        raise error

    return stage


def returning(value: Any) -> Callable[[], Any]:
    return lambda: value


def execute_once(tool: BaseTool, the_call: ToolCall) -> ToolResult:
    async def main() -> ToolResult:
        session = session_of(tool)
        try:
            return await session.execute(the_call)
        finally:
            assert await session.close() == []
            assert session.num_open == 0

    return run_virtual(main())


def kind_of(result: ToolResult) -> IncidentKind | None:
    return None if result.incident is None else result.incident.kind


def test_a_tool_is_created_once_and_released_once() -> None:
    tool = Notebook()

    async def main() -> None:
        session = session_of(tool)
        assert (await session.execute(call(text="a"))).response.text == "a"
        await session.execute(call(text="b"))
        assert session.num_open == 1
        assert await session.close() == []
        assert await session.close() == []
        assert session.num_open == 0

    run_virtual(main())
    assert tool.events == ["create", "execute", "execute", "release"]
    assert len({instance_id for _, instance_id, _ in tool.log}) == 1


def test_concurrent_calls_share_one_instance() -> None:
    tool = Notebook(create=lambda: asyncio.sleep(1), execute=lambda: asyncio.sleep(1))

    async def main() -> None:
        session = session_of(tool)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(session.execute(call()))
        await session.close()

    run_virtual(main())
    assert tool.events == ["create", "execute", "execute", "execute", "release"]


def test_each_stage_gets_its_kwargs_from_the_row() -> None:
    tool = Notebook()
    kwargs: dict[str, Any] = {
        "create_kwargs": {"truth": 42},
        "execute_kwargs": {"user": "ann"},
        "calc_reward_kwargs": None,
        "release_kwargs": {"force": True},
    }

    async def main() -> None:
        session = session_of(tool, notebook=kwargs, other_column=None)
        await session.execute(call())
        await session.calc_rewards()
        await session.close()

    run_virtual(main())
    assert [given for _, _, given in tool.log] == [{"truth": 42}, {"user": "ann"}, {}, {"force": True}]


@pytest.mark.parametrize(
    ("tools_kwargs", "says"),
    [
        ({"notebok": {}}, "unknown tool 'notebok'; did you mean 'notebook'"),
        ({"notebook": {"create_kwarg": {}}}, "unknown key 'create_kwarg'; did you mean 'create_kwargs'"),
        ({"notebook": 3}, "is 3 .int.; give a mapping"),
        ({"notebook": {"create_kwargs": []}}, "give a mapping"),
    ],
)
def test_a_row_with_unknown_tools_kwargs_is_refused(tools_kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        session_of(Notebook(), **tools_kwargs)


@pytest.mark.parametrize("stage", ["create", "execute"])
def test_the_model_reads_the_message_of_a_tool_error(stage: str) -> None:
    tool = Notebook(**{stage: raising(ToolError("no page 7\nof 5"))})
    result = execute_once(tool, call())
    assert result.response.text == "no page 7\nof 5"
    assert kind_of(result) is IncidentKind.TOOL_ERROR
    assert result.incident is not None
    assert result.incident.detail == "no page 7 of 5"


@pytest.mark.parametrize("stage", ["create", "execute"])
def test_a_hung_tool_times_out_and_is_released(stage: str) -> None:
    tool = Notebook(**{stage: hang})
    result = execute_once(tool, call())
    assert kind_of(result) is IncidentKind.TOOL_TIMEOUT
    assert result.response.text == "notebook took longer than 60 s and was stopped"
    assert tool.events[-1] == "release"


def test_a_function_that_blocks_its_thread_times_out() -> None:
    unblock = threading.Event()

    @function_tool
    def block() -> None:
        """Blocks."""
        unblock.wait()

    assert kind_of(execute_once(block, call("block"))) is IncidentKind.TOOL_TIMEOUT
    unblock.set()


def test_a_failed_create_is_repeated_by_the_next_call_and_both_are_released() -> None:
    failures = [ToolError("busy")]

    def create() -> None:
        if failures:
            raise failures.pop()

    tool = Notebook(create=create)

    async def main() -> None:
        session = session_of(tool)
        assert kind_of(await session.execute(call())) is IncidentKind.TOOL_ERROR
        assert kind_of(await session.execute(call())) is None
        assert session.num_open == 2
        assert await session.close() == []

    run_virtual(main())
    assert tool.events == ["create", "create", "execute", "release", "release"]
    created = [instance_id for stage, instance_id, _ in tool.log if stage == "create"]
    released = [instance_id for stage, instance_id, _ in tool.log if stage == "release"]
    assert created == released
    assert len(set(created)) == 2


@pytest.mark.parametrize("stage", ["create", "execute"])
@pytest.mark.parametrize(
    "error", [ZeroDivisionError("by zero"), TimeoutError("read timed out"), KeyError("x")]
)
def test_any_other_exception_is_a_bug_of_the_tool(stage: str, error: Exception) -> None:
    tool = Notebook(**{stage: raising(error)})
    with pytest.raises(
        ToolBug, match=f"tool 'notebook' raised {type(error).__name__}.*'text': 'hi'"
    ) as caught:
        execute_once(tool, call(text="hi"))
    assert caught.value.__cause__ is error
    assert tool.events[-1] == "release"


class Panic(BaseException):
    """Exception like the one that Rust extensions raise on a panic."""


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(1), Panic("unreachable")])
def test_a_tool_can_neither_fake_a_cancellation_nor_end_the_process(error: BaseException) -> None:
    with pytest.raises(ToolBug, match="raised RuntimeError: it raised"):
        execute_once(Notebook(execute=raising(error)), call())


@pytest.mark.parametrize(
    "returned",
    [
        7,
        ["text"],
        (),
        (ToolResponse(), None, {}, {}),
        (None, None, {}),
        {"text": {1, 2}, "who": object()},
        (ToolResponse(text=b"x"), None, {}),  # type: ignore
        (ToolResponse(image="note.png"), None, {}),  # type: ignore
        (ToolResponse(), "1", {}),
        (ToolResponse(), float("nan"), {}),
        (ToolResponse(), None, []),
    ],
)
def test_a_result_of_the_wrong_shape_is_a_bug_of_the_tool(returned: Any) -> None:
    with pytest.raises(ToolBug, match=r"tool 'notebook' returned .*; return "):
        execute_once(Notebook(execute=returning(returned)), call())


@pytest.mark.parametrize(
    ("returned", "text", "reward"),
    [
        ("fine", "fine", None),
        (ToolResponse(text="fine"), "fine", None),
        ({"total": 3, "unit": "\u20ac"}, '{"total": 3, "unit": "\u20ac"}', None),
        (({"total": 3},), '{"total": 3}', None),
        (("fine", 0.5), "fine", 0.5),
        (({"total": 3}, None, None), '{"total": 3}', None),
    ],
)
def test_reward_and_extra_may_be_omitted_and_a_dict_becomes_json(
    returned: Any, text: str, reward: float | None
) -> None:
    result = execute_once(Notebook(execute=returning(returned)), call())
    assert result == ToolResult(ToolResponse(text=text), reward=reward)


def test_an_unpaired_surrogate_is_replaced_so_that_records_can_be_written() -> None:
    result = execute_once(Notebook(execute=returning(("a\ud800b", None, {}))), call())
    assert result.response.text == "a?b"
    refused = execute_once(Notebook(execute=raising(ToolError("no \ud800"))), call())
    assert refused.response.text == "no ?"


def test_a_tool_cannot_change_the_recorded_call() -> None:
    class Eater(Notebook):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return parameters.pop("text"), None, {}

    the_call = call(text="kept")
    assert execute_once(Eater(), the_call).response.text == "kept"
    assert the_call.arguments == {"text": "kept"}


def test_only_tools_that_were_used_are_asked_for_rewards() -> None:
    used = Notebook("used", calc_reward=returning(0.5))
    silent = Notebook("silent")
    unused = Notebook("unused", calc_reward=returning(1.0))

    async def main() -> None:
        session = session_of(used, silent, unused)
        await session.execute(call("used"))
        await session.execute(call("silent"))
        assert await session.calc_rewards() == {"used": 0.5}
        await session.close()

    run_virtual(main())


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (raising(ValueError("none")), "calc_reward of tool 'notebook' raised ValueError: none"),
        (hang, "calc_reward of tool 'notebook' took longer than 10 s"),
        (returning("high"), "calc_reward of tool 'notebook' returned 'high' .str. as its reward"),
    ],
)
def test_a_reward_that_fails_is_a_bug_of_the_tool(verdict: Callable[[], Any], says: str) -> None:
    async def main() -> None:
        session = session_of(Notebook(calc_reward=verdict))
        await session.execute(call())
        with pytest.raises(ToolBug, match=says):
            await session.calc_rewards()
        assert await session.close() == []

    run_virtual(main())


def test_a_failing_or_hanging_release_is_reported_and_does_not_affect_others() -> None:
    tools = [
        Notebook("failing", release=raising(OSError("disk full"))),
        Notebook("hanging", release=hang),
        Notebook("cancelling", release=raising(asyncio.CancelledError())),
        Notebook("fine", release=lambda: asyncio.sleep(5)),
    ]

    async def main() -> list[str]:
        session = session_of(*tools)
        for tool in tools:
            await session.execute(call(tool.name))
        started = asyncio.get_running_loop().time()
        incidents = await session.close()
        assert asyncio.get_running_loop().time() - started == pytest.approx(10)
        assert {incident.kind for incident in incidents} == {IncidentKind.CLOSE_FAILED}
        assert session.num_open == 0
        return sorted(incident.detail for incident in incidents)

    details = run_virtual(main())
    assert len(details) == 3
    assert details[0].startswith("closing tool 'cancelling' raised RuntimeError: it raised CancelledError")
    assert details[1] == "closing tool 'failing' raised OSError: disk full"
    assert details[2] == "closing tool 'hanging' took longer than 10 s"
    assert all(tool.events.count("release") == 1 for tool in tools)


async def cancelled_during(session: ToolSession, work: Callable[[], Any], *, after_s: float) -> None:
    """Run the work in a task that is cancelled halfway, and close the session in any case."""

    async def main() -> None:
        try:
            await work()
        finally:
            await session.close()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(main())
        await asyncio.sleep(after_s)
        task.cancel()
    assert task.cancelled()


@pytest.mark.parametrize("stage", ["create", "execute"])
def test_a_cancelled_call_is_cancelled_and_its_instance_released(stage: str) -> None:
    tool = Notebook(**{stage: hang})

    async def main() -> None:
        session = session_of(tool)
        await cancelled_during(session, lambda: session.execute(call()), after_s=1)
        assert session.num_open == 0

    run_virtual(main())
    assert tool.events.count("release") == 1


def test_a_cancellation_during_close_waits_for_the_releases() -> None:
    ended: list[str] = []

    async def release() -> None:
        await asyncio.sleep(5)
        ended.append("slow")
        raise OSError("late")

    async def main() -> None:
        session = session_of(Notebook(release=release))
        await session.execute(call())
        await cancelled_during(session, lambda: session.close(), after_s=1)
        assert ended == ["slow"]
        assert session.num_open == 0
        assert [incident.detail for incident in await session.close()] == [
            "closing tool 'notebook' raised OSError: late"
        ]

    run_virtual(main())


def test_a_closed_session_refuses_calls() -> None:
    async def main() -> None:
        session = session_of(Notebook())
        await session.close()
        with pytest.raises(EpisodeError, match="one session per trajectory"):
            await session.execute(call())

    run_virtual(main())


def test_a_tool_that_is_always_judged_is_created_and_judged_without_a_call() -> None:
    tool, other = Notebook(calc_reward=returning(0.5)), Notebook("other", calc_reward=returning(0.25))
    tool.is_always_judged = True

    async def main() -> None:
        session = session_of(tool, other, notebook={"create_kwargs": {"page": 3}})
        assert session.has_verdict
        assert await session.calc_rewards() == {"notebook": 0.5}
        assert await session.close() == []

    run_virtual(main())
    assert tool.events == ["create", "calc_reward", "release"]
    assert tool.log[0][2] == {"page": 3}
    assert other.events == []


def test_a_tool_may_take_longer_than_others_to_judge_and_to_close() -> None:
    tool = Notebook(calc_reward=lambda: asyncio.sleep(100, 1.0), release=lambda: asyncio.sleep(100))
    tool.close_timeout_s = 200

    async def main() -> None:
        session = session_of(tool)
        await session.execute(call())
        assert await session.calc_rewards() == {"notebook": 1.0}
        assert await session.close() == []

    run_virtual(main())
    tool.close_timeout_s = 0
    with pytest.raises(ConfigError, match="close_timeout_s of tool 'notebook' is 0"):
        session_of(tool)
