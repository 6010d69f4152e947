import asyncio
import json
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from agent_loop.errors import ConfigError
from agent_loop.tools.python import PythonTool, strip_fence
from agent_loop.trajectory import IncidentKind
from agent_loop.types import ToolCall
from tests.helpers import text_reply, tool_call_reply, user
from tests.rollout.harness import WorkerHarness
from tests.tools.harness import execute, execute_each, kind_of, session_of
from tests.tools.sandboxes import HASTY, descendants, left_running, python_tool, readable_python, talk

pytestmark = pytest.mark.slow


def test_variables_and_imports_are_kept_and_the_last_value_is_returned() -> None:
    first, second, third = talk("import math\nx = 2\nx + 1", "math.sqrt(x * 8)", "print('said'); None")
    assert [first.text, second.text, third.text] == ["3", "4.0", "said"]


def test_a_traceback_shows_only_the_models_lines_and_the_state_is_kept() -> None:
    failed, after = talk("x = 1\ndef divide():\n    return x / 0\ndivide()", "x")
    assert failed.is_error
    assert failed.text.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<call 1>", line 4, in <module>',
        "    divide()",
        '  File "<call 1>", line 3, in divide',
        "    return x / 0",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
    ]
    assert after.text == "1"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x" * 1_000_001, "1000000 are allowed. It was not run."),
        ("x = '\0'", "null bytes"),
        ("x = '\ud800'", "(no output)"),
        ("x = (1,\nprint(x", '  File "<call 1>", line 2'),
        ("import subprocess\nsubprocess.run(['echo', 'from a program']).returncode", "from a program\n0"),
        ("import sys; 'sqlite3' in sys.modules", "True"),
        ("(" * 10_000, "too many nested parentheses"),
        ("", "(no output)"),
        ("# nothing", "(no output)"),
    ],
)
def test_unusual_code_runs_like_any_other(code: str, says: str) -> None:
    answer, after = talk(code, "1 + 1", preload=("sqlite3",))
    assert says in answer.text
    assert after.text == "2"


def test_random_numbers_are_the_same_in_every_sandbox_with_a_seed_and_not_without() -> None:
    code = "import random; random.random(), hash('x')"
    assert talk(code) == talk(code)
    assert talk(code, seed=None) != talk(code, seed=None)


def test_visible_paths_can_be_read_and_not_written() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder, "data.txt")
        path.write_text("shown")
        code = f"path = {str(path)!r}\nprint(open(path).read())\nopen(path, 'w')"
        (answer,) = talk(code, visible=(folder,))
    assert answer.text.startswith("shown")
    assert "[Errno 30]" in answer.text or "[Errno 13]" in answer.text


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)"),
        ("  ```py\nprint(1)\nprint(2)```\n", "print(1)\nprint(2)"),
        ("```\nx = '''```'''\n```", "x = '''```'''"),
        ("```python\nprint(1)", "print(1)"),
        ("print('```')", "print('```')"),
    ],
)
def test_a_markdown_fence_around_the_code_is_removed(given: str, code: str) -> None:
    assert strip_fence(given) == code


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"time_limit": 3}, "did you mean 'time_limit_s'"),
        ({"memory_mb": 1}, "memory_mb"),
        ({"visible": ["/no/such/thing"]}, "give absolute paths that exist"),
        ({"visible": ["/"]}, "would expose secrets"),
        ({"python": "/no/python"}, "/no/python could not be started"),
        ({"python": readable_python(), "preload": ["no_such_module"]}, "No module named 'no_such_module'"),
    ],
)
def test_a_wrong_setting_is_refused_before_any_work(config: dict[str, object], says: str) -> None:
    python_tool()
    with pytest.raises(ConfigError, match=says):
        PythonTool(config)


def call(code: str) -> ToolCall:
    return ToolCall(name="python", arguments={"code": code})


@pytest.fixture
def leaves_nothing() -> Generator[None]:
    """Check that a test leaves no process and no open file."""
    python_tool()
    before, open_files = descendants(), len(os.listdir("/proc/self/fd"))
    yield
    assert left_running(before) == set()
    assert len(os.listdir("/proc/self/fd")) == open_files


async def test_calls_of_one_turn_run_in_sequence_in_one_interpreter() -> None:
    session = session_of(python_tool())
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(session.execute(call(f"x = {n}\nx"))) for n in range(4)]
    assert await session.close() == []
    assert [each.result().response.text for each in calls] == ["0", "1", "2", "3"]


@pytest.mark.usefixtures("leaves_nothing")
async def test_a_call_over_its_time_limit_loses_the_sandbox_and_the_model_is_informed() -> None:
    tool = python_tool(seed=1)
    tool.timeout_s = 1.0
    calls = [call(code) for code in ("x = 1", "import time; time.sleep(1000)", "'x' in globals()")]
    _, cut, after = await execute_each([tool], *calls)
    assert kind_of(cut) is IncidentKind.TOOL_TIMEOUT
    assert str(after.response.text).startswith("The last call was aborted and the sandbox was restarted")
    assert str(after.response.text).endswith("False")


@pytest.mark.usefixtures("leaves_nothing")
async def test_a_cancelled_trajectory_leaves_no_process() -> None:
    session = session_of(python_tool())
    running = asyncio.ensure_future(session.execute(call("import time; time.sleep(1000)")))
    await asyncio.wait({running}, timeout=0.2)
    running.cancel()
    await asyncio.wait({running})
    assert await session.close() == []


@pytest.mark.usefixtures("leaves_nothing")
async def test_a_cancelled_create_leaves_no_process() -> None:
    tool = python_tool()
    for steps in range(6):
        creating = asyncio.ensure_future(tool.create(f"instance {steps}"))
        for _ in range(steps):
            await asyncio.sleep(0)
        creating.cancel()
        await asyncio.wait({creating})
        await tool.release(f"instance {steps}")
    await tool.create("whole")  # those before it have been started and have ended
    await tool.release("whole")


async def test_the_event_loop_is_not_blocked_while_code_runs() -> None:
    running = asyncio.ensure_future(execute(python_tool(**HASTY), code="while True: pass"))
    beats = 0
    while not running.done():
        await asyncio.wait({running}, timeout=0.01)
        beats += 1
    assert beats > 10


@pytest.mark.usefixtures("leaves_nothing")
async def test_concurrent_trajectories_have_separate_interpreters() -> None:
    code = "import os\nopen('mine', 'x').close()\nx = 40"
    script = [
        tool_call_reply("python", code=code),
        tool_call_reply("python", code="x += 2\nx"),
        text_reply("42"),
    ]
    harness = WorkerHarness(script, tools=[python_tool()])
    for trajectory in await harness.worker.run(
        harness.jobs([{"raw_prompt": user("How much is 40 + 2?")}] * 8)
    ):
        replies = [message["content"] for message in trajectory.output.messages if message["role"] == "tool"]
        assert replies == ["(no output)", "42"]
        assert trajectory.output.incidents == ()


async def test_duration_and_dropped_bytes_of_a_call_are_recorded() -> None:
    result = await execute(python_tool(output_limit_bytes=1000), code="print('x' * 10_000)")
    assert result.reward is None
    assert result.extra["dropped_bytes"] == 9001
    assert json.dumps(dict(result.extra))
