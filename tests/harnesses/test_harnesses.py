"""Harnesses with a program that the tests write: what it gets, how its end is read, and how it is resumed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import ConfigError, DataError
from agent_loop.harnesses.base import AgentRun, task_of
from agent_loop.harnesses.claude_code import ClaudeCodeLoop
from agent_loop.harnesses.codex import CodexLoop
from agent_loop.harnesses.opencode import OpenCodeLoop
from agent_loop.harnesses.qwen_code import QwenCodeLoop
from agent_loop.loops.registry import LoopRegistry
from agent_loop.recording.row_log import RowLog
from agent_loop.rollout.manager import check_rows
from agent_loop.runtime.child_process import CommandResult
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.helpers import text_reply, user
from tests.serve.harness import ProgramHarness, in_order, prompts

DOCS = Path(__file__).parents[2] / "docs" / "agents.md"

PROGRAM = """#!{python} -S
import json, os, subprocess, sys
from urllib.request import Request, urlopen

task = sys.stdin.read()
body = {{"model": sys.argv[sys.argv.index("--model") + 1], "messages": [{{"role": "user", "content": task}}]}}
headers = {{"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
request = Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
answer = json.load(urlopen(request))["choices"][0]["message"]["content"]
subprocess.run(answer, shell=True, check=True)
json.load(open(os.path.join(os.environ["HOME"], ".my-agent", "settings.json")))
print("warming up")
print(json.dumps({{"status": os.environ.get("STATUS", "done"), "reason": "too hard", "answer": answer}}))
sys.exit(int(os.environ.get("EXIT", "0")))
"""


@pytest.fixture(autouse=True)
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "root"))


@pytest.fixture
def my_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install `my-agent`."""
    program = tmp_path / "bin" / "my-agent"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> LoopRegistry:
    """Return the registry with the harness that the documentation shows."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    [code] = [block for block in blocks if "HarnessLoop" in block]
    path = tmp_path_factory.mktemp("documented") / "my_agent.py"
    path.write_text(code)
    return LoopRegistry(loop_files=[str(path)])


def run_one(loops: LoopRegistry, reply: str, **columns: Any) -> tuple[Trajectory, ProgramHarness]:
    harness = ProgramHarness(in_order(text_reply(reply)))
    harness.worker._loops = loops
    row = {"raw_prompt": user("Say hello."), "agent_name": "my-agent", **columns}
    [trajectory] = asyncio.run(harness.run(None, **row))
    return trajectory, harness


@pytest.mark.usefixtures("my_agent")
def test_the_harness_of_the_documentation_runs_its_program_in_the_workspace(documented: LoopRegistry) -> None:
    check = {"command": ["grep", "-qx", "hello", "greeting.txt"]}
    trajectory, harness = run_one(documented, "echo hello > greeting.txt", workspace={"check": check})
    assert trajectory.output.failure is None
    assert trajectory.reward == 1.0
    assert trajectory.output.extra_fields["agent_answer"] == "echo hello > greeting.txt"
    assert "Say hello." in prompts(harness.server.requests)[0]


@pytest.mark.usefixtures("my_agent")
def test_an_agent_that_gives_up_is_scored_and_one_that_fails_is_not(documented: LoopRegistry) -> None:
    check = {"command": ["true"]}
    gave_up, _ = run_one(documented, "true", workspace={"check": check, "env": {"STATUS": "gave_up"}})
    assert gave_up.output.stop_reason is StopReason.ANSWERED
    assert gave_up.reward == 1.0
    assert gave_up.output.extra_fields["agent_gave_up"] == "too hard"
    failed, _ = run_one(documented, "true", workspace={"check": check, "env": {"EXIT": "3"}})
    assert failed.output.stop_reason is StopReason.FAILED
    assert failed.reward is None
    assert "my-agent failed: exit status 3" in failed.output.failure.error
    assert "warming up" in failed.output.failure.traceback


def test_a_missing_program_is_refused_with_the_command_that_installs_it(documented: LoopRegistry) -> None:
    context = ProgramHarness(in_order(text_reply("x"))).worker._context
    check = partial(check_rows, context=context, loops=documented, default_agent_loop="my-agent")
    with pytest.raises(ConfigError, match=r"my-agent is not installed.* `pip install my-agent`"):
        check([{"raw_prompt": user("-")}])
    check([{"raw_prompt": user("-"), "workspace": {"container": {"image": "has-it"}}}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "has no text"),
        ([{"role": "assistant", "content": "a"}], "has the role 'assistant'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "an agent's task is text"),
    ],
)
def test_a_row_without_a_task_in_text_is_refused(messages: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        task_of({"raw_prompt": messages}, where="row 3")


def test_the_task_is_the_text_of_all_messages() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Fix it."}]
    assert task_of({"raw_prompt": messages}) == "Be brief.\n\nFix it."


@pytest.mark.parametrize(("context_length", "window"), [(131072, "131072"), (60000, None)])
def test_claude_code_learns_the_context_length_it_accepts(context_length: int, window: str | None) -> None:
    run = AgentRun("Fix it.", "/w", "/h", "http://127.0.0.1:1/v1", "key", "any", context_length, 4096)
    command = ClaudeCodeLoop.command(object.__new__(ClaudeCodeLoop), run)
    assert command.env.get("CLAUDE_CODE_AUTO_COMPACT_WINDOW") == window


REPORT = {"type": "result", "subtype": "success", "is_error": False, "result": "done"}
MESSAGE = json.dumps({"type": "item.completed", "item": {"type": "agent_message", "text": "done"}})
DONE, GAVE_UP, FAILED = ("done", False, False), (None, True, False), (None, False, True)


@pytest.mark.parametrize(
    ("loop_class", "stdout", "exit_code", "expected"),
    [
        (ClaudeCodeLoop, "warning\n" + json.dumps(REPORT), 0, DONE),
        (ClaudeCodeLoop, json.dumps({**REPORT, "is_error": True}), 1, FAILED),
        (ClaudeCodeLoop, json.dumps({**REPORT, "subtype": "error_max_turns", "is_error": True}), 1, GAVE_UP),
        (ClaudeCodeLoop, "", 0, FAILED),
        (CodexLoop, MESSAGE, 0, DONE),
        (CodexLoop, MESSAGE + '\n{"type": "turn.failed", "error": {"message": "no"}}', 1, FAILED),
        (OpenCodeLoop, '{"type": "text", "part": {"text": "done"}}', 0, DONE),
        (OpenCodeLoop, '{"type": "error", "error": {"name": "APIError"}}', 0, FAILED),
        (QwenCodeLoop, "done\n", 0, DONE),
        (QwenCodeLoop, "", 53, GAVE_UP),
        (QwenCodeLoop, "", 1, FAILED),
    ],
)
def test_the_end_of_an_agent_is_read_from_its_output(
    loop_class: type[Any], stdout: str, exit_code: int, expected: tuple[str | None, bool, bool]
) -> None:
    read = loop_class.end(object.__new__(loop_class), CommandResult(exit_code, stdout, ""))
    answer = read.answer if expected is DONE else None
    assert (answer, bool(read.gave_up), bool(read.error)) == expected


def test_a_log_compares_messages_without_dates_and_process_ids() -> None:
    log = RowLog("group=0/rollout=0")
    log.volatile = re.compile(QwenCodeLoop.volatile)
    digests: set[str] = set()
    for pid, day in ((1, 2), (34, 5)):
        text = f"Exit Code: 0\nProcess Group PGID: {pid}\nToday's date is Monday, March {day}, 2026."
        digests.add(log.digest([{"role": "tool", "content": [{"type": "text", "text": text}]}]))
    assert len(digests) == 1
