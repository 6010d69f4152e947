"""Tools within a trajectory: their life, their errors, and the limits of their calls."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agent_loop.errors import ConfigError, DataError, EpisodeError, ToolBug, ToolError, ToolUnavailable
from agent_loop.runtime.instances import OnReplay
from agent_loop.testing import run_virtual
from agent_loop.tools.base import BaseTool, ToolResponse, trajectory_of
from agent_loop.tools.function import function_tool
from agent_loop.tools.results import ToolResult
from agent_loop.tools.session import ToolSession
from agent_loop.trajectory import IncidentKind
from agent_loop.types import ToolCall
from tests.tools.harness import execute, kind_of, session_of, tool_schema

pytestmark = pytest.mark.virtual_time


async def hang() -> None:
    await asyncio.Event().wait()


class Notebook(BaseTool):
    """Tool that logs its calls. Each stage can run a given function."""

    def __init__(self, name: str = "notebook", **stages: Callable[..., Any]) -> None:
        super().__init__({}, tool_schema(name, text="string"))
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

    def ids(self, stage: str) -> list[str]:
        return [instance_id for passed, instance_id, _ in self.log if passed == stage]


class Service(Notebook):
    """Tool that takes a second and is unavailable a given number of times."""

    def __init__(self, *, faults: int = 0, seconds: float = 1.0) -> None:
        super().__init__("service", execute=self.serve)
        self.faults, self.seconds = faults, seconds
        self.running = self.most_at_once = 0

    async def serve(self) -> str:
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        if self.events.count("execute") <= self.faults:
            raise ToolUnavailable("no answer")
        return "served"


def call(name: str = "notebook", **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def raising(error: BaseException) -> Callable[[], Any]:
    def stage() -> Any:
        raise error

    return stage


def returning(value: Any) -> Callable[[], Any]:
    return lambda: value


async def test_a_tool_is_created_once_and_released_once() -> None:
    tool = Notebook(create=lambda: asyncio.sleep(1), execute=lambda: asyncio.sleep(1))
    session = session_of(tool)
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(session.execute(call()))
    assert (await session.execute(call(text="a"))).response.text == "a"
    assert session.num_open == 1
    assert await session.close() == []
    assert await session.close() == []
    assert session.num_open == 0
    assert tool.events == ["create", "execute", "execute", "execute", "release"]
    assert len({instance_id for _, instance_id, _ in tool.log}) == 1


async def test_each_stage_gets_its_kwargs_from_the_row() -> None:
    tool = Notebook()
    kwargs: dict[str, Any] = {
        "create_kwargs": {"truth": 42},
        "execute_kwargs": {"user": "ann"},
        "calc_reward_kwargs": None,
        "release_kwargs": {"force": True},
    }
    session = session_of(tool, notebook=kwargs, other_column=None)
    await session.execute(call())
    await session.calc_rewards()
    await session.close()
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
async def test_the_model_reads_the_message_of_a_tool_error(stage: str) -> None:
    result = await execute(Notebook(**{stage: raising(ToolError("no page 7\nof \ud8005"))}))
    assert result.response.text == "no page 7\nof ?5"
    assert kind_of(result) is IncidentKind.TOOL_ERROR
    assert result.incident is not None
    assert result.incident.detail == "no page 7 of ?5"


@pytest.mark.parametrize("stage", ["create", "execute"])
async def test_a_hung_tool_times_out_and_is_released(stage: str) -> None:
    tool = Notebook(**{stage: hang})
    result = await execute(tool)
    assert kind_of(result) is IncidentKind.TOOL_TIMEOUT
    assert result.response.text == "notebook took longer than 60 s and was stopped"
    assert tool.events[-1] == "release"


async def test_a_function_that_blocks_its_thread_times_out() -> None:
    unblock = threading.Event()

    @function_tool
    def block() -> None:
        """Blocks."""
        unblock.wait()

    session = session_of(block)
    assert kind_of(await session.execute(call("block"))) is IncidentKind.TOOL_TIMEOUT
    assert await session.close() == []
    unblock.set()


async def test_a_failed_create_is_repeated_by_the_next_call_and_both_are_released() -> None:
    failures = [ToolError("busy")]

    def create() -> None:
        if failures:
            raise failures.pop()

    tool = Notebook(create=create)
    session = session_of(tool)
    assert kind_of(await session.execute(call())) is IncidentKind.TOOL_ERROR
    assert kind_of(await session.execute(call())) is None
    assert session.num_open == 2
    assert await session.close() == []
    assert tool.events == ["create", "create", "execute", "release", "release"]
    assert tool.ids("create") == tool.ids("release")
    assert len(set(tool.ids("create"))) == 2


@pytest.mark.parametrize("stage", ["create", "execute"])
@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), TimeoutError("read timed out")])
async def test_any_other_exception_is_a_bug_of_the_tool(stage: str, error: Exception) -> None:
    tool = Notebook(**{stage: raising(error)})
    message = f"tool 'notebook' raised {type(error).__name__}.*'text': 'hi'"
    with pytest.raises(ToolBug, match=message) as caught:
        await execute(tool, text="hi")
    assert caught.value.__cause__ is error
    assert tool.events[-1] == "release"


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(1)])
async def test_a_tool_can_neither_fake_a_cancellation_nor_end_the_process(error: BaseException) -> None:
    with pytest.raises(ToolBug, match="raised RuntimeError: it raised"):
        await execute(Notebook(execute=raising(error)))


@pytest.mark.parametrize(
    "returned",
    [
        7,
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
async def test_a_result_of_the_wrong_shape_is_a_bug_of_the_tool(returned: Any) -> None:
    with pytest.raises(ToolBug, match=r"tool 'notebook' returned .*; return "):
        await execute(Notebook(execute=returning(returned)))


@pytest.mark.parametrize(
    ("returned", "text", "reward"),
    [
        ("fine", "fine", None),
        (ToolResponse(text="fine"), "fine", None),
        ({"total": 3, "unit": "\u20ac"}, '{"total": 3, "unit": "\u20ac"}', None),
        (({"total": 3},), '{"total": 3}', None),
        (("fine", 0.5), "fine", 0.5),
        (({"total": 3}, None, None), '{"total": 3}', None),
        ("a\ud800b", "a?b", None),
    ],
)
async def test_reward_and_extra_may_be_omitted_and_a_dict_becomes_json(
    returned: Any, text: str, reward: float | None
) -> None:
    result = await execute(Notebook(execute=returning(returned)))
    assert result == ToolResult(ToolResponse(text=text), reward=reward)


async def test_a_tool_cannot_change_the_recorded_call() -> None:
    class Eater(Notebook):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return parameters.pop("text"), None, {}

    session, the_call = session_of(Eater()), call(text="kept")
    assert (await session.execute(the_call)).response.text == "kept"
    assert the_call.arguments == {"text": "kept"}
    await session.close()


async def test_tools_that_were_used_or_are_always_judged_are_asked_for_rewards() -> None:
    used = Notebook("used", calc_reward=returning(0.5))
    silent = Notebook("silent")
    unused = Notebook("unused", calc_reward=returning(1.0))
    always = Notebook("always", calc_reward=returning(0.25))
    always.is_always_judged = True
    assert not session_of(used, silent, unused).has_verdict
    session = session_of(used, silent, unused, always, always={"create_kwargs": {"page": 3}})
    assert session.has_verdict
    await session.execute(call("used"))
    await session.execute(call("silent"))
    assert await session.calc_rewards() == {"used": 0.5, "always": 0.25}
    assert await session.close() == []
    assert always.events == ["create", "calc_reward", "release"]
    assert always.log[0][2] == {"page": 3}
    assert unused.events == []


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (raising(ValueError("none")), "calc_reward of tool 'notebook' raised ValueError: none"),
        (hang, "calc_reward of tool 'notebook' took longer than 10 s"),
        (returning("high"), "calc_reward of tool 'notebook' returned 'high' .str. as its reward"),
    ],
)
async def test_a_reward_that_fails_is_a_bug_of_the_tool(verdict: Callable[[], Any], says: str) -> None:
    session = session_of(Notebook(calc_reward=verdict))
    await session.execute(call())
    with pytest.raises(ToolBug, match=says):
        await session.calc_rewards()
    assert await session.close() == []


async def test_a_failing_or_hanging_release_is_reported_and_does_not_affect_others() -> None:
    tools = [
        Notebook("failing", release=raising(OSError("disk full"))),
        Notebook("hanging", release=hang),
        Notebook("cancelling", release=raising(asyncio.CancelledError())),
        Notebook("fine", release=lambda: asyncio.sleep(5)),
    ]
    session = session_of(*tools)
    for tool in tools:
        await session.execute(call(tool.name))
    started = asyncio.get_running_loop().time()
    incidents = await session.close()
    assert asyncio.get_running_loop().time() - started == pytest.approx(10)
    assert {incident.kind for incident in incidents} == {IncidentKind.CLOSE_FAILED}
    assert session.num_open == 0
    cancelling, failing, hanging = sorted(incident.detail for incident in incidents)
    assert cancelling.startswith("closing tool 'cancelling' raised RuntimeError: it raised CancelledError")
    assert failing == "closing tool 'failing' raised OSError: disk full"
    assert hanging == "closing tool 'hanging' took longer than 10 s"
    assert all(tool.events.count("release") == 1 for tool in tools)


async def cancel_during(session: ToolSession, work: Callable[[], Any]) -> None:
    """Run the work in a task that is cancelled after a second, and close the session in any case."""

    async def main() -> None:
        try:
            await work()
        finally:
            await session.close()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(main())
        await asyncio.sleep(1)
        task.cancel()
    assert task.cancelled()
    assert session.num_open == 0


@pytest.mark.parametrize("stage", ["create", "execute"])
async def test_a_cancelled_call_is_cancelled_and_its_instance_released(stage: str) -> None:
    tool = Notebook(**{stage: hang})
    session = session_of(tool)
    await cancel_during(session, lambda: session.execute(call()))
    assert tool.events.count("release") == 1


async def test_a_cancellation_during_close_waits_for_the_releases() -> None:
    ended: list[str] = []

    async def release() -> None:
        await asyncio.sleep(5)
        ended.append("slow")
        raise OSError("late")

    session = session_of(Notebook(release=release))
    await session.execute(call())
    await cancel_during(session, session.close)
    assert ended == ["slow"]
    [incident] = await session.close()
    assert incident.detail == "closing tool 'notebook' raised OSError: late"


async def test_a_closed_session_refuses_calls() -> None:
    session = session_of(Notebook())
    await session.close()
    with pytest.raises(EpisodeError, match="one session per trajectory"):
        await session.execute(call())


async def test_a_tool_may_take_longer_than_others_to_judge_and_to_close() -> None:
    tool = Notebook(calc_reward=lambda: asyncio.sleep(100, 1.0), release=lambda: asyncio.sleep(100))
    tool.close_timeout_s = 200
    session = session_of(tool)
    await session.execute(call())
    assert await session.calc_rewards() == {"notebook": 1.0}
    assert await session.close() == []


async def call_in_trajectories(tool: BaseTool, *, num: int) -> tuple[list[ToolResult], float]:
    """Run one call in each of several concurrent trajectories. Return the results and the duration."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(execute_and_close(session_of(tool), tool.name)) for _ in range(num)]
    return [task.result() for task in tasks], asyncio.get_running_loop().time()


async def execute_and_close(session: ToolSession, name: str) -> ToolResult:
    result = await session.execute(ToolCall(name, {}))
    assert await session.close() == []
    return result


def test_max_concurrent_limits_the_calls_of_all_trajectories_of_each_event_loop() -> None:
    tool = Service()
    tool.max_concurrent = 3
    for _ in range(2):
        results, seconds = run_virtual(call_in_trajectories(tool, num=10))
        assert [kind_of(result) for result in results] == [None] * 10
        assert seconds == pytest.approx(4.0)
    assert tool.most_at_once == 3


async def test_the_time_limit_of_a_call_begins_when_the_call_does() -> None:
    tool = Service()
    tool.max_concurrent, tool.timeout_s = 1, 1.5
    results, seconds = await call_in_trajectories(tool, num=5)
    assert [kind_of(result) for result in results] == [None] * 5
    assert seconds == pytest.approx(5.0)


async def test_a_cancelled_call_no_longer_counts_as_concurrent() -> None:
    tool = Service(seconds=1000)
    tool.max_concurrent, tool.timeout_s = 1, 2000
    sessions = [session_of(tool) for _ in range(3)]
    running, waiting = (asyncio.ensure_future(session.execute(call("service"))) for session in sessions[:2])
    await asyncio.sleep(1)
    running.cancel()
    waiting.cancel()
    await asyncio.wait({running, waiting})
    tool.seconds = 1
    assert (await sessions[2].execute(call("service"))).response.text == "served"
    for session in sessions:
        await session.close()


async def test_a_tools_own_time_limit_overrides_the_general_one() -> None:
    tool = Service(seconds=10)
    tool.timeout_s = 2
    [result], seconds = await call_in_trajectories(tool, num=1)
    assert kind_of(result) is IncidentKind.TOOL_TIMEOUT
    assert result.response.text == "service took longer than 2 s and was stopped"
    assert seconds == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("faults", "text", "kind"),
    [(2, "served", None), (9, "no answer (tried 3 times)", IncidentKind.TOOL_UNAVAILABLE)],
)
async def test_an_unavailable_call_is_retried_if_it_may_run_twice(faults: int, text: str, kind: Any) -> None:
    tool = Service(faults=faults)
    tool.on_replay, tool.retries = OnReplay.RECORDED, 2
    [result], seconds = await call_in_trajectories(tool, num=1)
    assert (kind_of(result), result.response.text) == (kind, text)
    assert seconds == pytest.approx(3.0 + 0.25 + 0.5)
    assert tool.events == ["create", "execute", "execute", "execute", "release"]


async def test_a_tool_error_is_not_retried() -> None:
    tool = Notebook(execute=raising(ToolError("no")))
    tool.on_replay, tool.retries = "recorded", 3
    assert kind_of(await execute(tool)) is IncidentKind.TOOL_ERROR
    assert tool.events.count("execute") == 1


@pytest.mark.parametrize("on_replay", [OnReplay.ONCE, OnReplay.RESTART, OnReplay.RERUN])
def test_a_call_that_may_not_be_run_twice_cannot_ask_for_retries(on_replay: OnReplay) -> None:
    tool = Service()
    tool.on_replay, tool.retries = on_replay, 1
    with pytest.raises(ConfigError, match="set retries to 0, or set on_replay to 'recorded'"):
        session_of(tool)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retries", -1),
        ("max_concurrent", 0),
        ("timeout_s", 0),
        ("close_timeout_s", 0),
        ("on_replay", "twice"),
    ],
)
def test_a_limit_out_of_range_is_refused(name: str, value: Any) -> None:
    tool = Service()
    session_of(tool)  # (a declaration may change between two trajectories)
    setattr(tool, name, value)
    with pytest.raises(ConfigError, match=name):
        session_of(tool)


async def test_instance_ids_identify_their_trajectory() -> None:
    first, second = Notebook("first"), Notebook("second")
    for session in [session_of(first, second), session_of(first, second)]:
        for name in ("first", "second"):
            await session.execute(call(name))
        await session.close()
    ids = first.ids("create"), second.ids("create")
    assert [trajectory_of(i) for i in ids[0]] == [trajectory_of(i) for i in ids[1]]
    assert len({*ids[0], *ids[1]}) == 4
    assert len({trajectory_of(i) for i in ids[0]}) == 2
