import asyncio
import json
import os
import tempfile
from pathlib import Path

import pytest

from agent_loop.errors import ConfigError
from agent_loop.tools.python import PythonTool, strip_fence
from agent_loop.tools.session import ToolSession, ToolSessionConfig
from agent_loop.trajectory import IncidentKind
from agent_loop.types import ToolCall
from tests.helpers import text_reply, tool_call_reply, user
from tests.rollout.harness import WorkerHarness
from tests.tools.sandboxes import HASTY, ask, descendants, left_running, python_tool, readable_python, talk

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


def test_a_syntax_error_shows_the_line() -> None:
    (failed,) = talk("x = (1,\nprint(x")
    assert "SyntaxError" in failed.text
    assert "<call 1>" in failed.text


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x" * 1_000_001, "1000000 are allowed. It was not run."),
        ("x = '\0'", "null bytes"),
        ("x = '\ud800'", "(no output)"),
        ("(" * 10_000, "too many nested parentheses"),
        ("", "(no output)"),
        ("# nothing", "(no output)"),
    ],
)
def test_unusual_code_runs_like_any_other(code: str, says: str) -> None:
    answer, after = talk(code, "1 + 1")
    assert says in answer.text
    assert after.text == "2"


def test_output_of_child_processes_is_returned() -> None:
    assert talk("import subprocess\nsubprocess.run(['echo', 'from a program']).returncode")[0].text == (
        "from a program\n0"
    )


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


def test_a_preloaded_module_is_already_imported() -> None:
    assert talk("import sys; 'sqlite3' in sys.modules", preload=("sqlite3",))[0].text == "True"


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
    ],
)
def test_a_wrong_setting_is_refused_before_any_work(config: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PythonTool(config)


def test_a_module_that_cannot_be_preloaded_is_refused() -> None:
    python_tool()
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        PythonTool({"preload": ["no_such_module"], "python": readable_python()})


def session(tool: PythonTool) -> ToolSession:
    return ToolSession({"python": tool}, config=ToolSessionConfig(timeout_s=30.0, close_timeout_s=30.0))


def call(code: str) -> ToolCall:
    return ToolCall(name="python", arguments={"code": code})


def test_calls_of_one_turn_run_in_sequence_in_one_interpreter() -> None:
    async def main() -> list[str | None]:
        tools = session(python_tool())
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(tools.execute(call(f"x = {n}\nx"))) for n in range(4)]
        assert await tools.close() == []
        return [each.result().response.text for each in calls]

    assert asyncio.run(main()) == ["0", "1", "2", "3"]


def test_a_cancelled_call_loses_the_sandbox_and_the_model_is_informed() -> None:
    tool = python_tool(seed=1)
    tool.timeout_s = 1.0
    before = descendants()

    async def main() -> None:
        tools = session(tool)
        await tools.execute(call("x = 1"))
        cut = await tools.execute(call("import time; time.sleep(1000)"))
        assert cut.incident is not None
        assert cut.incident.kind is IncidentKind.TOOL_TIMEOUT
        after = await tools.execute(call("'x' in globals()"))
        assert after.response.text is not None
        assert after.response.text.startswith("The last call was aborted and the sandbox was restarted")
        assert after.response.text.endswith("False")
        assert await tools.close() == []

    asyncio.run(main())
    assert left_running(before) == set()


def test_a_cancelled_trajectory_leaves_no_process() -> None:
    tool = python_tool()
    before, open_files = descendants(), len(os.listdir("/proc/self/fd"))

    async def main() -> None:
        tools = session(tool)
        running = asyncio.ensure_future(tools.execute(call("import time; time.sleep(1000)")))
        await asyncio.wait({running}, timeout=0.2)
        running.cancel()
        await asyncio.wait({running})
        assert await tools.close() == []

    asyncio.run(main())
    assert left_running(before) == set()
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_cancelled_create_leaves_no_process() -> None:
    tool = python_tool()
    before, open_files = descendants(), len(os.listdir("/proc/self/fd"))

    async def main() -> None:
        for steps in range(6):
            creating = asyncio.ensure_future(tool.create(f"instance {steps}"))
            for _ in range(steps):
                await asyncio.sleep(0)
            creating.cancel()
            await asyncio.wait({creating})
            await tool.release(f"instance {steps}")
        await tool.create("whole")  # those before it have been started and have ended
        await tool.release("whole")

    asyncio.run(main())
    assert left_running(before) == set()
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_the_event_loop_is_not_blocked_while_code_runs() -> None:
    tool = python_tool(**HASTY)

    async def main() -> int:
        beats = 0
        await tool.create("i")
        running = asyncio.ensure_future(ask(tool, "i", "while True: pass"))
        while not running.done():
            await asyncio.wait({running}, timeout=0.01)
            beats += 1
        await tool.release("i")
        return beats

    assert asyncio.run(main()) > 10


def test_concurrent_trajectories_have_separate_interpreters() -> None:
    tool = python_tool()
    before = descendants()
    code = "import os\nopen('mine', 'x').close()\nx = 40"
    harness = WorkerHarness(
        [tool_call_reply("python", code=code), tool_call_reply("python", code="x += 2\nx"), text_reply("42")],
        tools=[tool],
    )
    rows = [{"raw_prompt": user("How much is 40 + 2?")} for _ in range(8)]
    trajectories = asyncio.run(harness.worker.run(harness.jobs(rows)))
    for trajectory in trajectories:
        replies = [message["content"] for message in trajectory.output.messages if message["role"] == "tool"]
        assert replies == ["(no output)", "42"]
        assert trajectory.output.incidents == ()
    assert left_running(before) == set()


def test_duration_and_dropped_bytes_of_a_call_are_recorded() -> None:
    tool = python_tool(output_limit_bytes=1000)

    async def main() -> dict[str, object]:
        await tool.create("i")
        _, reward, extra = await tool.execute("i", {"code": "print('x' * 10_000)"})
        await tool.release("i")
        assert reward is None
        return extra

    extra = asyncio.run(main())
    assert extra["dropped_bytes"] == 9001
    assert json.dumps(extra)
