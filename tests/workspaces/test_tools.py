"""The tools `shell` and `edit_file` in the tool loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_loop.recording.record import RecordKind
from agent_loop.rollout.journal import open_journal
from agent_loop.runtime.owner import this_process
from agent_loop.servers.scripted import ScriptedReply
from agent_loop.tools.registry import load_tools
from agent_loop.trajectory import IncidentKind, Trajectory
from agent_loop.types import StopReason
from agent_loop.workspaces.folder import root_folder
from agent_loop.workspaces.tools import num_shared, workspace_tools
from tests.helpers import text_reply, tool_call_reply, user
from tests.rollout.harness import WorkerHarness
from tests.rollout.journaled import cut_after, key_of


@pytest.fixture(autouse=True)
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "root"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "sum.py").write_text("print(1 - 2)\n")
    return folder


def shell(command: str) -> ScriptedReply:
    return tool_call_reply("shell", command=command)


def edit(path: str, old: str, new: str) -> ScriptedReply:
    return tool_call_reply("edit_file", path=path, old_text=old, new_text=new)


DONE = text_reply("Done.")


def play(
    *replies: ScriptedReply,
    rows: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any] | None = None,
    **limits: Any,
) -> list[Trajectory]:
    """Run rows with these workspaces in the tool loop, in real time, and check that nothing is left."""
    script = [*replies, DONE]
    harness = WorkerHarness(
        lambda request: script[min(request.turn, len(replies))], tools=workspace_tools(config or {}), **limits
    )

    async def scenario() -> list[Trajectory]:
        jobs = harness.jobs([{"raw_prompt": user("Fix it."), **row} for row in rows])
        trajectories = await harness.worker.run(jobs)
        harness.assert_nothing_is_left()
        return trajectories

    trajectories = asyncio.run(scenario())
    assert num_shared() == 0
    assert not [path for path in root_folder().iterdir() if path.name.startswith(this_process().token)]
    return trajectories


def workspace(source: Path, check: str = "") -> dict[str, Any]:
    """Return the settings of a workspace with a copy of a folder, and a check if one is given."""
    checked = {"check": {"command": ["sh", "-c", check]}} if check else {}
    return {"folder": str(source), **checked}


def replies_to(trajectory: Trajectory) -> list[str]:
    return [m["content"] for m in trajectory.output.messages if m["role"] == "tool"]


def test_a_shell_agent_fixes_a_file_and_is_judged_by_the_check_of_its_row(source: Path) -> None:
    script = [shell("cat sum.py; pwd"), edit("sum.py", "1 - 2", "1 + 2"), shell("cat sum.py")]
    script += [edit("new/deep/file.txt", "", "text"), shell("cat new/deep/file.txt")]
    [trajectory] = play(*script, rows=[{"workspace": workspace(source, "grep -q '1 + 2' sum.py")}])
    assert trajectory.output.stop_reason is StopReason.ANSWERED, trajectory.output.failure
    first, second, third, _, fifth = replies_to(trajectory)
    assert first.startswith("print(1 - 2)\n/")
    assert (second, third, fifth) == ("sum.py was edited", "print(1 + 2)", "text")
    assert trajectory.reward == 1.0
    assert (source / "sum.py").read_text() == "print(1 - 2)\n"


def test_an_agent_that_calls_no_tool_is_judged_too(source: Path) -> None:
    wrong, right = (workspace(source, f"grep -q '{text}' sum.py") for text in ("1 + 2", "1 - 2"))
    trajectories = play(rows=[{"workspace": wrong}, {"workspace": json.dumps(right)}])
    assert [trajectory.reward for trajectory in trajectories] == [0.0, 1.0]


def test_a_workspace_of_the_config_is_used_and_its_keys_are_replaced_by_those_of_the_row(
    source: Path,
) -> None:
    rows = [{}, {"workspace": {"check": {"command": ["false"]}}}]
    trajectories = play(shell("ls"), rows=rows, config={"workspace": workspace(source, "true")})
    assert [replies_to(trajectory) for trajectory in trajectories] == [["sum.py"], ["sum.py"]]
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 0.0]


def test_a_command_that_fails_or_hangs_is_told_to_the_model(source: Path) -> None:
    config = {"workspace": workspace(source), "command_timeout_s": 1}
    script = [
        shell("echo one; echo two >&2; echo three; exit 3"),
        shell("if"),
        shell("echo before; sleep 60"),
        shell("head -c 100000 /dev/zero | tr '\\\\0' x"),
        shell("true"),
    ]
    [trajectory] = play(*script, rows=[{}], config=config, response_length=100_000, prompt_length=100_000)
    failed, wrong, hung, long, quiet = replies_to(trajectory)
    assert failed == "one\ntwo\nthree\n[exit status 3]"
    assert "[exit status 2]" in wrong
    assert hung == "before\n[the command exceeded the time limit of 1 s and was killed]"
    assert quiet == "(no output)"
    assert trajectory.reward is None
    kinds = {incident.kind for incident in trajectory.output.incidents}
    assert "bytes are left out]" in long or IncidentKind.TRUNCATED_REPLY in kinds


@pytest.mark.parametrize(
    ("path", "old", "problem"),
    [
        ("sum.py", "absent", "occurs 0 times"),
        ("sum.py", " ", "occurs 2 times"),
        ("absent.py", "a", "there is no file 'absent.py'"),
        ("binary", "a", "not text in UTF-8"),
        ("folder", "a", "is not a file"),
        ("folder/", "", "is not the path of a file"),
        ("sum.py/new", "", "cannot be put"),
    ],
)
def test_an_edit_that_is_impossible_is_told_to_the_model(
    source: Path, path: str, old: str, problem: str
) -> None:
    (source / "binary").write_bytes(b"\xff\xfea")
    (source / "folder").mkdir()
    [trajectory] = play(edit(path, old, "b"), rows=[{"workspace": workspace(source)}])
    assert trajectory.output.stop_reason is StopReason.ANSWERED, trajectory.output.failure
    assert trajectory.output.incidents[0].kind is IncidentKind.TOOL_ERROR
    assert problem in replies_to(trajectory)[0]


def test_a_workspace_or_a_check_that_cannot_start_fails_its_trajectory_alone(source: Path) -> None:
    unchecked = {"folder": str(source), "check": {"command": ["no-such-program"]}}
    settings = [{"folder": "absent"}, workspace(source), None, unchecked]
    absent, well, without, check = play(shell("ls"), rows=[{"workspace": each} for each in settings])
    errors = [each.output.failure.error for each in (absent, without, check)]
    assert errors[0].startswith("WorkspaceError: workspace.folder is 'absent', which is not a folder")
    assert replies_to(well) == ["sum.py"]
    assert "there is no workspace" in errors[1]
    assert check.output.stop_reason is StopReason.FAILED
    assert errors[2].startswith("WorkspaceError: command ['no-such-program'] cannot be started")
    assert check.reward is None


def test_the_tools_are_loaded_by_simple_names(tmp_path: Path, source: Path) -> None:
    config = tmp_path / "tools.yaml"
    config.write_text(f"tools:\n  - class_name: workspace\n    config: {{workspace: {{folder: {source}}}}}\n")
    assert sorted(load_tools([], config_path=config)) == ["edit_file", "shell"]
    assert sorted(load_tools(["shell", "edit_file"])) == ["edit_file", "shell"]


def test_a_trajectory_that_used_a_workspace_restarts_in_a_new_one_after_a_crash(
    tmp_path: Path, source: Path
) -> None:
    rows = [{"raw_prompt": user("Count."), "workspace": workspace(source, "test -e log")}]
    script = [shell("echo call >> log; wc -l < log")] * 2 + [DONE]
    path = tmp_path / "journal"

    async def run(*, resume: bool) -> Trajectory:
        harness = WorkerHarness(lambda request: script[request.turn], tools=workspace_tools({}))
        async with open_journal(path, key=key_of(rows), rows=rows, resume=resume, refuse=False) as journal:
            ended, jobs = journal.divide(harness.jobs(rows))
            assert ended == []
            [trajectory] = await harness.worker.run(jobs)
        harness.assert_nothing_is_left()
        return trajectory

    whole = asyncio.run(run(resume=False))
    assert replies_to(whole) == ["1", "2"]
    path.write_bytes(cut_after(path.read_bytes(), RecordKind.CALL_ENDED, count=1))
    resumed = asyncio.run(run(resume=True))
    assert [incident.kind for incident in resumed.output.incidents] == [IncidentKind.RESTARTED]
    assert replies_to(resumed) == ["1", "2"]
    assert (whole.reward, resumed.reward) == (1.0, 1.0)
