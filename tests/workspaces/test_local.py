"""Workspaces on this machine: folders, git repositories and providers; checks of their results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import ConfigError, WorkspaceError, WorkspaceFileMissing
from agent_loop.rollout.failures import failure_of
from agent_loop.runtime.owner import this_process
from agent_loop.workspaces import factory
from agent_loop.workspaces.check import check_reward
from agent_loop.workspaces.factory import open_workspace
from agent_loop.workspaces.folder import make_folder, new_name, remove_orphaned_folders, root_folder
from agent_loop.workspaces.settings import CheckSettings, read_workspace

PROVIDERS = "agent_loop.workspaces.folder"
DAEMON = """
import subprocess
no = subprocess.DEVNULL
print(subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=no, stderr=no).pid)
"""


@pytest.fixture(autouse=True)
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give a test a root folder of its own, and check that no folder of a workspace is left in it."""
    (tmp_path / "root").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "root"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "root"))
    yield
    assert own_folders() == []


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file.txt").write_text("one")
    (folder / "link").symlink_to("deep/file.txt")
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for text in ("first", "second"):
        (folder / "file.txt").write_text(text)
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", text)
    return folder


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    run = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return run.stdout.strip()


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


def own_folders() -> list[str]:
    """Return the folders of workspaces of this process, without the shared clones."""
    token = this_process().token
    return [
        f.name for f in root_folder().iterdir() if f.name.startswith(token) and not f.name.endswith("clones")
    ]


async def test_a_folder_is_copied_for_each_trajectory_and_removed(source: Path) -> None:
    settings = {"folder": str(source)}
    async with open_workspace(settings) as one, open_workspace(settings) as other:
        assert one.folder != other.folder
        result = await one.exec(["sh", "-c", "./run.sh; cat link; echo two > deep/file.txt"])
        assert (result.exit_code, result.stdout) == (0, "ran\none")
        assert (await other.exec(["cat", "deep/file.txt"])).stdout == "one"
        assert len(own_folders()) == 2
        await one.exec(["chmod", "-R", "a-w", "."])
    assert (source / "deep" / "file.txt").read_text() == "one"


async def test_files_are_put_and_got(source: Path, tmp_path: Path) -> None:
    async with open_workspace({"folder": str(source)}) as workspace:
        await workspace.put(source / "run.sh", "new/folder/")
        await workspace.put(source, "again")
        assert (await workspace.exec(["cat", "again/deep/file.txt", "new/folder/run.sh"])).exit_code == 0
        await workspace.get("deep", tmp_path / "got")
        assert (tmp_path / "got" / "file.txt").read_text() == "one"
        with pytest.raises(WorkspaceFileMissing, match="absent"):
            await workspace.get("absent", tmp_path / "x")
        with pytest.raises(WorkspaceError, match="absent"):
            await workspace.put(tmp_path / "absent", "x")


async def test_commands_get_no_secret_and_the_given_variables(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    settings = {"folder": str(source), "env": {"OF_WORKSPACE": "1"}}
    async with open_workspace(settings) as workspace:
        result = await workspace.exec(["env"], env={"OF_CALL": "2"}, stdin=b"")
        assert "hidden" not in result.stdout
        assert {"OF_WORKSPACE=1", "OF_CALL=2", f"PWD={workspace.folder}"} <= set(result.stdout.splitlines())


async def test_processes_that_left_their_group_end_with_the_workspace(source: Path, tmp_path: Path) -> None:
    async with open_workspace({"folder": str(source)}) as workspace:
        result = await workspace.exec([sys.executable, "-S", "-c", DAEMON])
        pid = int(result.stdout)
        os.kill(pid, 0)
    assert not is_running(pid)


async def test_a_command_that_hangs_ends_at_its_time_limit_and_the_workspace_stays_usable(
    source: Path,
) -> None:
    async with open_workspace({"folder": str(source)}) as workspace:
        assert (await workspace.exec(["sleep", "60"], timeout_s=0.2)).timed_out
        assert (await workspace.exec(["echo", "well"])).stdout == "well\n"
        with pytest.raises(WorkspaceError, match="cannot be started"):
            await workspace.exec(["no-such-program"])


async def test_a_repository_is_cloned_once_and_checked_out_at_its_commit(repository: Path) -> None:
    first = git(repository, "rev-parse", "HEAD~1")
    settings = {"git": {"url": str(repository), "commit": first}}
    async with open_workspace(settings) as workspace:
        assert (await workspace.exec(["cat", "file.txt"])).stdout == "first"
        assert (await workspace.exec(["git", "remote"])).stdout == ""
        assert (await workspace.exec(["git", "status", "--porcelain"])).stdout == ""
        await workspace.exec(["sh", "-c", "echo changed > file.txt"])
    shutil.rmtree(repository)
    async with open_workspace(settings) as workspace:
        assert (await workspace.exec(["cat", "file.txt"])).stdout == "first"


async def test_a_commit_that_is_newer_than_the_clone_is_fetched(repository: Path) -> None:
    async with open_workspace({"git": {"url": str(repository)}}) as workspace:
        assert (await workspace.exec(["cat", "file.txt"])).stdout == "second"
    (repository / "file.txt").write_text("third")
    git(repository, "commit", "-q", "-a", "-m", "third")
    commit = git(repository, "rev-parse", "HEAD")
    async with open_workspace({"git": {"url": str(repository), "commit": commit}}) as workspace:
        assert (await workspace.exec(["cat", "file.txt"])).stdout == "third"
    with pytest.raises(WorkspaceError, match=r"'absent', which .* does not have"):
        async with open_workspace({"git": {"url": str(repository), "commit": "absent"}}):
            pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"folder": "a", "git": {"url": "b"}}, "give one of folder and git"),
        ({"folders": "a"}, "did you mean 'folder'"),
        ({"container": {"image": "a", "runtme": "docker"}}, "'container.runtme'; did you mean 'runtime'"),
        ({"container": {"image": "a", "dockerfile": "b"}}, "give one of image and dockerfile"),
        ({"container": {"image": "a", "memory": "much"}}, "memory"),
        ({"folder": "a", "options": {"a": 1}}, "name it in provider"),
        ("{", "not valid JSON"),
        (3, "give a mapping"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_workspace(settings, where="row 3: workspace")


def test_settings_of_a_table_may_be_json_or_hold_nulls() -> None:
    row = {"folder": None, "container": {"image": "a", "cpus": None}, "git": None, "check": None}
    assert (
        read_workspace(json.dumps(row))
        == read_workspace(row)
        == read_workspace({"container": {"image": "a"}})
    )


async def checked(source: Path, command: str, **settings: Any) -> Any:
    check = CheckSettings(command=("sh", "-c", command), **settings)
    async with open_workspace({"folder": str(source)}) as workspace:
        await workspace.exec(["sh", "-c", "echo 1 > reward.txt"])
        return await check_reward(workspace, check)


@pytest.mark.parametrize(
    ("command", "settings", "reward"),
    [
        ("true", {}, 1.0),
        ("false", {}, 0.0),
        ("no-such-command", {}, 0.0),
        ("echo 0.25 > reward.txt", {"reward_file": "reward.txt"}, 0.25),
        ("""echo '{"reward": 0.5, "tests": 3}' > r""", {"reward_file": "r"}, 0.5),
        ("echo 0 > reward.txt; exit 3", {"reward_file": "reward.txt"}, 0.0),
    ],
)
async def test_a_check_gives_the_reward(
    source: Path, command: str, settings: dict[str, Any], reward: float
) -> None:
    score = await checked(source, command, **settings)
    assert score.reward == reward
    assert "check_exit_code" in score.extra


@pytest.mark.parametrize(
    ("command", "settings", "problem"),
    [
        ("echo half; sleep 60", {"timeout_s": 0.3}, "time limit of 0.3 s; its output ends with: half"),
        ("kill -9 $$", {}, "was killed"),
        ("sh -c 'kill -9 $$'; exit $?", {}, "was killed"),
        ("echo 0 > reward.txt; kill -9 $$", {"reward_file": "reward.txt"}, "was killed"),
        ("exit 3", {"reward_file": "reward.txt"}, "wrote no reward.txt"),
        ("echo much > reward.txt", {"reward_file": "reward.txt"}, "wrote no reward into reward.txt"),
    ],
)
async def test_a_check_that_did_not_judge_is_retried_and_then_has_no_reward(
    source: Path, command: str, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(WorkspaceError, match=problem) as raised:
        await checked(source, command, **settings)
    assert failure_of(raised.value).is_retried


async def test_a_check_uses_files_that_the_agent_did_not_see(source: Path, tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "test.sh").write_text("grep -q one deep/file.txt && echo passed")
    score = await checked(source, "sh tests/test.sh", files=str(tmp_path / "hidden"), files_to="tests")
    assert (score.reward, score.extra["check_output"]) == (1.0, "passed\n")


async def test_a_check_that_cannot_run_is_an_error_and_no_reward(source: Path) -> None:
    async with open_workspace({"folder": str(source)}) as workspace:
        with pytest.raises(WorkspaceError, match="no-such-program"):
            await check_reward(workspace, CheckSettings(command=("no-such-program",)))
        with pytest.raises(WorkspaceError, match="absent"):
            await check_reward(workspace, CheckSettings(command=("true",), files="absent"))
        await workspace.stop()
        with pytest.raises(WorkspaceError, match="does not exist any more"):
            await check_reward(workspace, CheckSettings(command=("true",)))


async def test_the_provider_of_the_documentation_works(tmp_path: Path, source: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "workspaces.md").read_text()
    code = page.rpartition("```python\n")[2].partition("```")[0]
    provider = tmp_path / "ssh_workspaces.py"
    provider.write_text(code.replace("/tmp/workspaces", f"{tmp_path}/remote"))
    orphan = tmp_path / "remote" / f"{replace(this_process(), pid=2**22 + 1).token}.x"
    orphan.mkdir(parents=True)
    settings = {
        "provider": f"{provider}:SshProvider",
        "options": {"login": ["sh", "-c"]},
        "folder": str(source),
    }
    async with open_workspace(settings) as workspace:
        assert not orphan.is_dir()
        assert workspace.folder.startswith(f"{tmp_path}/remote/")
        result = await workspace.exec(["sh", "-c", "cat deep/file.txt - ; exit 3"], stdin=b" and two")
        assert (result.exit_code, result.stdout) == (3, "one and two")
        assert (await workspace.exec(["pwd"], folder="deep")).stdout == f"{workspace.folder}/deep\n"
        assert (await workspace.exec(["sh", "-c", "echo $A"], env={"A": "b c"})).stdout == "b c\n"
        assert (await workspace.exec(["sleep", "1234.5"], timeout_s=0.3)).timed_out
        assert (await workspace.exec(["pgrep", "-f", "sleep 1234[.]5"])).exit_code == 1
        await workspace.put(source / "run.sh", "new/run.sh")
        await workspace.get("new/run.sh", tmp_path / "got")
        assert (tmp_path / "got").read_text() == (source / "run.sh").read_text()
        with pytest.raises(WorkspaceFileMissing):
            await workspace.get("absent", tmp_path / "x")
    assert os.listdir(tmp_path / "remote") == []


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"folder": "/absent"}, WorkspaceError, r"absent.*is not a folder"),
        ({"provider": f"{PROVIDERS}:FolderWorkspace"}, ConfigError, "name a subclass of WorkspaceProvider"),
        ({"provider": f"{PROVIDERS}:FolderProvider", "options": {"a": 1}}, ConfigError, "with options"),
        ({"provider": "no_such_module:Class"}, ConfigError, "no_such_module"),
    ],
)
async def test_a_workspace_that_cannot_be_created_is_an_error(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        async with open_workspace(settings):
            pass


async def test_the_first_start_removes_folders_whose_owner_is_dead(source: Path) -> None:
    factory._remove_orphans_once.cache_clear()
    dead = replace(this_process(), pid=2**22 + 1)
    names = [f"{dead.token}.x", f"{replace(dead, machine='00000000').token}.x", "other"]
    for name in names:
        (root_folder() / name / "workspace").mkdir(parents=True)
    async with open_workspace({"folder": str(source)}):
        assert not set(names[:1]) & set(os.listdir(root_folder()))
        assert set(names[1:]) <= set(os.listdir(root_folder()))


def names(folder: str | Path) -> list[str]:
    return [path.name for path in Path(folder).iterdir()]


async def test_folders_with_the_same_key_have_the_same_path_one_after_the_other_and_never_at_once() -> None:
    async with open_workspace({}, key="ab12") as first:
        await first.exec(["touch", "file"])
        async with open_workspace({}, key="ab12") as second:
            assert second.folder != first.folder
            assert names(second.folder) == []
        assert names(first.folder) == ["file"]
    async with open_workspace({}, key="ab12") as again:
        assert again.folder == first.folder
        assert names(again.folder) == []
    async with open_workspace({}, key="ab13") as other:
        assert other.folder != first.folder
    assert names(root_folder()) == []


def test_a_killed_process_leaves_its_path_to_the_next_one() -> None:
    code = """
import os
from agent_loop.workspaces.folder import make_folder, new_name
print(make_folder(new_name("ab12")), flush=True)
os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    stable = Path(killed.stdout.strip())
    assert stable.is_dir()
    assert make_folder(new_name("ab12")) != stable
    assert remove_orphaned_folders() == 1
    assert make_folder(new_name("ab12")) == stable
    shutil.rmtree(root_folder())
