"""Workspaces in real containers of Podman. Run after `tests/workspaces/install_containers.sh`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import WorkspaceError, WorkspaceFileMissing
from agent_loop.runtime.child_process import inherited_environment, run_command
from agent_loop.runtime.owner import this_process
from agent_loop.workspaces.base import Workspace
from agent_loop.workspaces.check import check_reward
from agent_loop.workspaces.container.container import OWNER_LABEL
from agent_loop.workspaces.container.gateway_access import _by_helper
from agent_loop.workspaces.container.pool import _pools, close_pools
from agent_loop.workspaces.container.workspace import ContainerWorkspace
from agent_loop.workspaces.factory import open_workspace
from agent_loop.workspaces.settings import CheckSettings
from agent_loop.workspaces.tools import workspace_tools
from tests.helpers import text_reply, tool_call_reply, user
from tests.rollout.harness import WorkerHarness

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(
        shutil.which("podman") is None, reason="needs podman: tests/workspaces/install_containers.sh"
    ),
]

BUSYBOX = "localhost/agent-loop-busybox"
BASE = "localhost/agent-loop-base"


def podman(*arguments: str) -> str:
    return subprocess.run(["podman", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def own_containers() -> list[str]:
    return podman(
        "ps", "-a", "--filter", f"label={OWNER_LABEL}={this_process().token}", "--format", "{{.Names}}"
    ).split()


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    close_pools()
    assert own_containers() == []


@asynccontextmanager
async def container(image: str = BUSYBOX, **settings: Any) -> AsyncGenerator[ContainerWorkspace]:
    async with open_workspace({"container": {"image": image, **settings}}) as workspace:
        assert isinstance(workspace, ContainerWorkspace)
        yield workspace


async def shell(workspace: Workspace, script: str, **arguments: Any) -> str:
    result = await workspace.exec(["sh", "-c", script], **arguments)
    assert result.exit_code == 0, result
    return result.stdout


async def sleeping(workspace: Workspace) -> asyncio.Future[Any]:
    """Start a command that sleeps, and wait until it runs."""
    task = asyncio.ensure_future(workspace.exec(["sleep", "1234"]))
    while "1234" not in await shell(workspace, "ps"):
        pass
    return task


async def test_a_container_runs_commands_with_their_folder_environment_and_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    async with container(env={"OF_WORKSPACE": "1", "PATH": "/bin:/extra"}) as workspace:
        assert workspace.folder == "/workspace"
        assert await shell(workspace, "pwd") == "/workspace\n"
        assert await shell(workspace, "mkdir /workspace/deep; cd /; pwd", folder="/tmp") == "/\n"
        assert await shell(workspace, "pwd", folder="deep") == "/workspace/deep\n"
        variables = (await shell(workspace, "env", env={"OF_CALL": "a b"})).splitlines()
        assert {"OF_WORKSPACE=1", "OF_CALL=a b", "PATH=/bin:/extra"} <= set(variables)
        assert not [variable for variable in variables if "hidden" in variable]
        assert await shell(workspace, "cat", stdin=b"given") == "given"
        failed = await workspace.exec(["sh", "-c", "echo why >&2; exit 3"])
        assert (failed.exit_code, failed.stderr) == (3, "why\n")
        assert (await workspace.exec(["sh", "-c", "exit 126"])).exit_code == 126
        with pytest.raises(WorkspaceError, match=r"no-such-program.*cannot be started"):
            await workspace.exec(["no-such-program"])


async def test_files_are_put_and_got(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "run.sh").write_text("#!/bin/sh\necho ran")
    (source / "deep" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("deep/run.sh")
    async with container(user="agent") as workspace:
        await workspace.put(source, ".")
        await workspace.put(source / "deep" / "run.sh", "a/b/")
        await workspace.put(source, "again")
        assert await shell(workspace, "deep/run.sh; ./link; a/b/run.sh; again/link") == "ran\n" * 4
        assert await shell(workspace, "stat -c %u:%g deep/run.sh") == "1000:1000\n"
        links = "ln -s /etc/passwd deep/outside; ln -s more deep/inside"
        await shell(workspace, f"echo more > deep/more; {links}")
        await workspace.get("deep", tmp_path / "got")
        assert sorted(path.name for path in (tmp_path / "got").iterdir()) == ["inside", "more", "run.sh"]
        await workspace.get("/workspace/deep/more", tmp_path / "file")
        assert (tmp_path / "file").read_text() == "more\n"
        with pytest.raises(WorkspaceFileMissing, match="/workspace/absent"):
            await workspace.get("absent", tmp_path / "x")
        with pytest.raises(WorkspaceError, match="absent"):
            await workspace.put(tmp_path / "absent", "x")


async def test_a_folder_or_repository_is_copied_into_a_container(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("one")
    settings = {"folder": str(tmp_path), "container": {"image": BUSYBOX}}
    async with open_workspace(settings) as workspace:
        assert await shell(workspace, "cat file.txt") == "one"


@pytest.mark.parametrize("user", ["", "agent"])
async def test_a_command_that_exceeds_its_time_limit_leaves_no_process(user: str) -> None:
    async with container(user=user) as workspace:
        await workspace.exec(["sh", "-c", "setsid sleep 1234 & sleep 1234"], timeout_s=1.5)
        assert "1234" not in await shell(workspace, "ps")


async def test_a_command_that_is_cancelled_leaves_no_process() -> None:
    async with container() as workspace:
        task = await sleeping(workspace)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "1234" not in await shell(workspace, "ps")


async def test_a_container_that_was_killed_is_an_error_and_no_result() -> None:
    async with container() as workspace:
        task = await sleeping(workspace)
        podman("kill", workspace.name)
        with pytest.raises(WorkspaceError, match="has ended"):
            await task
        with pytest.raises(WorkspaceError, match="has ended"):
            await check_reward(workspace, CheckSettings(command=("true",)))


async def test_a_command_whose_client_was_killed_is_an_error_and_leaves_no_process() -> None:
    async with container() as workspace:
        task = await sleeping(workspace)
        pattern = f"podman exec .*{workspace.name}.* sleep 1234"
        clients = await run_command(["pgrep", "-f", pattern], env=inherited_environment())
        os.kill(int(clients.stdout), signal.SIGKILL)
        with pytest.raises(WorkspaceError, match="was ended by signal 9"):
            await task
        assert "1234" not in await shell(workspace, "ps")


async def test_a_container_reaches_the_service_that_it_is_given_and_nothing_else() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"x" * 100_000)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    other = await asyncio.start_server(answer, "127.0.0.1", 0)
    [url, url_of_other] = [f"http://127.0.0.1:{s.sockets[0].getsockname()[1]}" for s in (server, other)]
    async with server, other, container() as workspace:
        assert await workspace.reach(url) == url
        assert len(await shell(workspace, f"wget -q -O - {url}/a; wget -q -O - {url}/b")) >= 2**16
        assert (await workspace.exec(["wget", "-q", "-O", "-", url_of_other])).exit_code == 1
        assert (await shell(workspace, "cat /proc/net/dev")).count(":") == 1  # the loopback interface
    async with server, container(network="host") as workspace:
        assert (await workspace.exec(["cat", "/proc/net/tcp"])).exit_code == 0
    async with container(network="none") as workspace:
        with pytest.raises(WorkspaceError, match="cannot reach"):
            await workspace.reach(url)


async def test_limits_hold() -> None:
    async with container(BASE, memory="64m", pids=20) as workspace:
        eater = await workspace.exec(["python3", "-c", "x = b'x' * 200_000_000"])
        assert eater.exit_code == 137
        forks = "import os\nfor _ in range(40):\n    if not os.fork(): import time; time.sleep(60)"
        refused = await workspace.exec(["python3", "-c", forks], timeout_s=20)
        assert "Resource temporarily unavailable" in refused.stderr
    async with container(lifetime_s=1) as workspace:
        deadline = time.monotonic() + 60
        with pytest.raises(WorkspaceError, match="has ended"):
            while time.monotonic() < deadline:
                await workspace.exec(["sleep", "1"])


async def test_mounts_are_seen_inside(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("shared")
    async with container(mounts=[f"{tmp_path}:/shared:ro"]) as workspace:
        assert await shell(workspace, "cat /shared/file") == "shared"
        assert (await workspace.exec(["touch", "/shared/new"])).exit_code == 1


async def test_an_image_is_built_once_for_each_content(tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(f"FROM {BUSYBOX}\nARG WORD\nRUN echo $WORD {os.getpid()} > /built\nWORKDIR /app\n")

    async def built() -> tuple[str, str]:
        settings = {"dockerfile": str(tmp_path), "build_args": {"WORD": "one"}}
        async with open_workspace({"container": settings}) as workspace:
            assert isinstance(workspace, ContainerWorkspace)
            image = podman("inspect", "--format", "{{.Image}}", workspace.name)
            return image, f"{workspace.folder} {await shell(workspace, 'cat /built')}"

    image, text = await built()
    assert text == f"/app one {os.getpid()}\n"
    assert (await built())[0] == image
    await asyncio.to_thread(dockerfile.write_text, f"FROM {BUSYBOX}\nRUN echo to-the-end && exit 7\n")
    with pytest.raises(WorkspaceError, match="to-the-end"):
        async with open_workspace({"container": {"dockerfile": str(tmp_path), "pids": 99}}):
            pass
    podman("rmi", "--force", image)


async def test_an_image_that_does_not_exist_is_named() -> None:
    with pytest.raises(WorkspaceError, match="neither has nor can pull"):
        async with container("localhost/no-such-image"):
            pass


async def test_warm_containers_are_used_once_each_and_removed() -> None:
    async with container(pool=2):
        pass
    while sum(pool.num_warm for pool in _pools) < 2:
        await asyncio.to_thread(podman, "version")
    killed, other = own_containers()
    podman("kill", killed)
    async with container(pool=2) as workspace:
        assert workspace.name == other
        assert await shell(workspace, "ls; touch dirt") == ""
    async with container(pool=2) as workspace:
        assert workspace.name not in (killed, other)
        assert await shell(workspace, "ls") == ""


async def test_a_start_that_is_cancelled_leaves_no_container() -> None:
    async def use_forever() -> None:
        async with container():
            await asyncio.Event().wait()

    for delay_s in (0.05, 0.15, 0.25, 0.4):
        task = asyncio.ensure_future(use_forever())
        await asyncio.wait({task}, timeout=delay_s)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


def test_a_shell_agent_works_in_a_container_and_is_judged_there() -> None:
    script = [
        tool_call_reply("edit_file", path="sum.py", old_text="", new_text="print(1 - 2)"),
        tool_call_reply("edit_file", path="sum.py", old_text="1 - 2", new_text="1 + 2"),
        tool_call_reply("shell", command="python3 sum.py; sleep 60"),
        text_reply("Done."),
    ]
    check = {"command": ["sh", "-c", "test $(python3 sum.py) = 3"]}
    tools = workspace_tools({"command_timeout_s": 5})
    harness = WorkerHarness(lambda request: script[request.turn], tools=tools)
    row = {"raw_prompt": user("Add."), "workspace": {"container": {"image": BASE}, "check": check}}
    [trajectory] = asyncio.run(harness.worker.run(harness.jobs([row])))
    assert trajectory.output.failure is None
    replies = [message["content"] for message in trajectory.output.messages if message["role"] == "tool"]
    assert replies[:2] == ["sum.py was written", "sum.py was edited"]
    assert replies[2].startswith("3\n[the command exceeded")
    assert trajectory.reward == 1.0


async def test_a_helper_program_opens_the_socket_where_this_process_lacks_the_rights() -> None:
    async with container() as workspace:
        pid = int(podman("inspect", "--format", "{{.State.Pid}}", workspace.name))
        with await asyncio.to_thread(_by_helper, ["env"], pid, 4321) as listener:
            client = asyncio.ensure_future(shell(workspace, "nc 127.0.0.1 4321"))
            connection, _ = await asyncio.to_thread(listener.accept)
            with connection:
                connection.sendall(b"hello")
            assert await client == "hello"
