"""Tests of rows from tasks in Harbor's form."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import RolloutConfig
from agent_loop.errors import ConfigError, DataError
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_rows
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row, StopReason
from agent_loop.workspaces.settings import read_workspace
from tests.environments.harbor.tasks import write_task
from tests.helpers import hermes_template, text_reply


def rows_of(*sources: Path, **workspace: Any) -> list[dict[str, Any]]:
    return load_rows([str(source) for source in sources], prompt_key="prompt", workspace=workspace)


def test_a_row_has_the_instruction_and_the_name(tmp_path: Path) -> None:
    text = "[task]\nname = 'bench/answer'\n[metadata]\ndifficulty = 'easy'\n"
    (row,) = rows_of(write_task(tmp_path / "answer", task_toml=text))
    assert row["raw_prompt"] == [{"role": "user", "content": "Write 42 to answer.txt."}]
    assert (row["task"], row["data_source"]) == ("bench/answer", "bench")
    assert row["extra_info"] == {"difficulty": "easy"}
    assert "agent_name" not in row


def test_the_workspace_is_the_container_that_the_tests_judge(tmp_path: Path) -> None:
    text = (
        "[environment]\ncpus = 2\nmemory = '1G'\nworkdir = '/src'\nbuild_timeout_sec = 90\nenv = {MODE = 'fast'}\n"
        "[verifier]\ntimeout_sec = 70\nenv = {STRICT = '1'}\n"
    )
    folder = write_task(tmp_path / "answer", task_toml=text)
    (row,) = rows_of(folder)
    workspace = read_workspace(row["workspace"])
    assert workspace.container is not None
    assert workspace.container.dockerfile == str(folder / "environment")
    assert (workspace.container.cpus, workspace.container.memory) == (2.0, "1024m")
    assert (workspace.container.folder, workspace.container.env) == ("/src", {"MODE": "fast"})
    assert workspace.start_timeout_s == 90.0
    assert workspace.check is not None
    assert (workspace.check.files, workspace.check.files_to) == (str(folder / "tests"), "/tests")
    assert (workspace.check.timeout_s, workspace.check.env) == (70.0, {"STRICT": "1"})


def test_a_prebuilt_image_is_used_instead_of_the_dockerfile(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "answer", task_toml="[environment]\ndocker_image = 'debian:12'\n")
    (row,) = rows_of(folder)
    container = read_workspace(row["workspace"]).container
    assert container is not None
    assert (container.image, container.dockerfile) == ("debian:12", "")


def test_settings_are_merged_over_the_workspaces_of_tasks(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "answer", task_toml="[environment]\ncpus = 2\nmemory_mb = 64\n")
    (row,) = rows_of(folder, container={"runtime": "docker", "cpus": 1, "build_args": {"BASE_IMAGE": "mine"}})
    container = read_workspace(row["workspace"]).container
    assert container is not None
    assert (container.runtime, container.cpus, container.memory) == ("docker", 1.0, "64m")
    assert container.build_args == {"BASE_IMAGE": "mine"}


def test_a_provider_gets_the_settings_of_the_container(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "answer", task_toml="[environment]\ncpus = 2\n")
    (row,) = rows_of(folder, provider="cloud.py:Cloud", options={"region": "north"})
    workspace = read_workspace(row["workspace"])
    assert workspace.container is None
    assert workspace.options == {
        "region": "north",
        "container": {"cpus": 2.0, "dockerfile": str(folder / "environment")},
    }


def test_settings_are_merged_over_the_workspaces_of_other_rows_too(tmp_path: Path) -> None:
    lines = ('{"prompt": "a", "workspace": {"check": {"command": ["true"]}}}', '{"prompt": "b"}')
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    with_check, without = rows_of(path, folder="some/folder")
    assert with_check["workspace"] == {"check": {"command": ["true"]}, "folder": "some/folder"}
    assert without["workspace"] == {"folder": "some/folder"}
    assert "workspace" not in rows_of(path)[1]


def test_a_wrong_setting_is_an_error_of_the_run(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "answer")
    with pytest.raises(ConfigError, match=r"data\.workspace.*container\.cpu"):
        rows_of(folder, container={"cpu": 1})


def test_settings_cannot_move_a_task_out_of_its_container(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="would write to this machine"):
        rows_of(write_task(tmp_path / "answer"), container=None, folder=str(tmp_path))


def test_variables_come_from_the_settings_and_never_from_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "secret of the parent")
    text = "[environment]\nenv = {LEVEL = '${LEVEL:-low}'}\n[verifier]\nenv = {KEY = 'Bearer ${API_KEY}'}\n"
    write_task(tmp_path / "tasks/answer", task_toml=text)
    write_task(tmp_path / "tasks/plain")
    unusable, _ = rows_of(tmp_path / "tasks")
    assert "API_KEY" in unusable["error"]
    assert "secret of the parent" not in str(unusable)
    row, _ = rows_of(tmp_path / "tasks", container={"env": {"API_KEY": "given"}})
    workspace = read_workspace(row["workspace"])
    assert workspace.check is not None
    assert workspace.container is not None
    assert workspace.check.env == {"KEY": "Bearer given"}
    assert workspace.container.env["LEVEL"] == "low"


def test_a_changed_file_of_a_task_changes_its_row(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "answer")
    before = rows_of(folder)
    assert rows_of(folder) == before
    (folder / "tests/test.sh").write_text("#!/bin/sh\necho 0 > /logs/verifier/reward.txt\n")
    assert rows_of(folder) != before


def test_a_bad_task_fails_its_own_row_by_name(tmp_path: Path) -> None:
    write_task(tmp_path / "bad", task_toml="[environment]\ncpu = 1\n")
    write_task(tmp_path / "good")
    rows = rows_of(tmp_path)
    assert [row["task"] for row in rows] == ["bad", "good"]
    bad, good = run([rows[0], {**rows[1], "agent_name": "single_turn_agent"}])
    assert bad.output.stop_reason is StopReason.FAILED
    assert bad.output.failure is not None
    assert "bad" in bad.output.failure.error
    assert "environment.cpu" in bad.output.failure.error
    assert good.output.stop_reason is StopReason.ANSWERED


def test_a_folder_without_a_usable_task_is_refused(tmp_path: Path) -> None:
    write_task(tmp_path / "bad", task_toml="[environment]\ncpu = 1\n")
    with pytest.raises(DataError, match=r"none of the 1 tasks.*environment\.cpu"):
        rows_of(tmp_path)


def test_the_time_limit_of_the_agent_ends_its_trajectory(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "answer", task_toml="[agent]\ntimeout_sec = 0.05\n")
    (row,) = rows_of(folder)
    assert row["trajectory_timeout_s"] == 0.05
    (trajectory,) = run([{**row, "agent_name": "single_turn_agent"}], hangs=True)
    assert trajectory.output.stop_reason is StopReason.DEADLINE


def run(rows: list[Row], *, hangs: bool = False) -> list[Trajectory]:
    """Run the rows with a model that answers at once, or never."""
    reply = text_reply("Done.", latency_s=math.inf if hangs else 0.0)
    config = RolloutConfig(prompt_length=512, response_length=64)

    async def roll_out() -> list[Trajectory]:
        servers = [ScriptedServer(lambda request: reply)]
        async with AgentLoopManager(config, servers=servers, template=hermes_template()) as manager:
            return await manager.run(rows, n=1)

    return asyncio.run(roll_out())
