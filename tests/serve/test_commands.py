"""Agent programs that are commands."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from agent_loop.serve.program import AgentProgramLoop
from agent_loop.trajectory import AgentLoopOutput
from tests.helpers import text_reply
from tests.serve.harness import ProgramHarness, in_order, job

CALLS_THE_MODEL = """
import json, os, sys
from urllib.request import Request, urlopen
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "?"}]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_the_last_line_is_split_only_at_newlines() -> None:
    said = json.dumps({"reward": 1, "said": "one\u2028two"}, ensure_ascii=False)
    code = CALLS_THE_MODEL + f"sys.stdout.buffer.write({said!r}.encode())"
    [trajectory] = asyncio.run(ProgramHarness(in_order(text_reply("x"))).run(None, command=python(code)))
    assert trajectory.reward == 1.0
    assert trajectory.output.extra_fields == {"said": "one\u2028two"}


@pytest.mark.parametrize("command", ["python agent.py", [], ["python", 1], 3])
def test_a_command_must_be_a_list_of_strings(command: Any) -> None:
    [trajectory] = asyncio.run(
        ProgramHarness(in_order(text_reply("x"))).worker.run([job(None, command=command)])
    )
    assert "as a list of strings: [python, agent.py]" in trajectory.output.failure.error


def test_a_command_sees_no_secret_of_the_parent_unless_env_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "DATABASE_URL"):
        monkeypatch.setenv(name, "secret")
    code = (
        CALLS_THE_MODEL
        + "print(json.dumps({'seen': sorted(k for k, v in os.environ.items() if v == 'secret')}))"
    )
    harness = ProgramHarness(in_order(text_reply("x")))
    loop = AgentProgramLoop(harness.worker._context, command=python(code), env={"TOKEN": "$HF_TOKEN"})
    output = asyncio.run(loop.run({}, raw_prompt=[]))
    assert isinstance(output, AgentLoopOutput)
    assert output.extra_fields == {"seen": ["TOKEN"]}


def test_a_command_runs_in_the_workspace_of_its_row_and_is_judged_by_its_check(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("before")
    code = (
        CALLS_THE_MODEL
        + "open('file.txt', 'w').write('after'); print(json.dumps({'kept': sys.stdin.read(2)}))"
    )
    check = {"command": ["grep", "-q", "after", "file.txt"]}
    rows = [{"workspace": {"folder": str(tmp_path), "check": check}}, {"workspace": {"folder": "absent"}}]
    harness = ProgramHarness(in_order(text_reply("x")))
    jobs = [job(None, command=python(code), group=group, **row) for group, row in enumerate(rows)]

    well, failed = asyncio.run(harness.worker.run(jobs))
    assert (well.reward, well.output.extra_fields["kept"]) == (1.0, '{"')
    assert well.output.extra_fields["check_exit_code"] == 0
    assert (tmp_path / "file.txt").read_text() == "before"
    assert "'absent', which is not a folder" in failed.output.failure.error


def test_a_function_works_in_the_workspace_from_beside_it(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("given")

    async def program(row: Any, *, base_url: str, api_key: str, workspace: Any) -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        return {"reward": 0.5, "read": (await workspace.exec(["cat", "file.txt"])).stdout}

    harness = ProgramHarness(in_order(text_reply("x")))
    [trajectory] = asyncio.run(harness.run(program, workspace={"folder": str(tmp_path)}))
    assert (trajectory.reward, trajectory.output.extra_fields["read"]) == (0.5, "given")
