"""Containers: started, inspected and removed through the runtime's command line."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

from agent_loop.errors import WorkspaceError
from agent_loop.runtime.child_process import CommandResult
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.owner import num_spared_orphans, parse_owner, this_process
from agent_loop.runtime.threads import run_in_thread
from agent_loop.workspaces.container.command_line import COMMAND_TIMEOUT_S, CommandLine, Image, last_lines
from agent_loop.workspaces.settings import ContainerSettings

logger = logging.getLogger(__name__)

RUN_LABEL = "agent-loop.run"
OWNER_LABEL = "agent-loop.owner"
DEFAULT_FOLDER = "/workspace"
START_TIMEOUT_S = 300.0
MAX_STARTING = 8
"""Number of containers that one event loop starts at once. The rest wait."""
WAIT_SCRIPT = "trap 'exit 0' TERM INT; sleep {seconds} & wait $!"
"""Program of the container's first process. It also reaps the orphaned processes of commands."""
FOLDER_SCRIPT = 'mkdir -p "$1" && { [ -z "$2" ] || chown "$2" "$1"; }'

_starting: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Container:
    """A container that was started."""

    command_line: CommandLine
    name: str
    folder: str
    """Working folder of commands."""
    user: str
    """User of commands. Empty is root."""

    async def is_running(self) -> bool:
        """Return whether the container still runs."""
        result = await self.command_line.run("inspect", "--format", "{{.State.Running}}", self.name)
        return result.exit_code == 0 and result.stdout.strip() == "true"

    async def remove(self) -> None:
        """End all processes of the container and remove it. Nothing happens if it does not exist."""
        await remove_containers(self.command_line, [self.name])


async def start_container(
    command_line: CommandLine, settings: ContainerSettings, *, image: Image, name: str
) -> Container:
    """Start a container that waits for commands."""
    loop = asyncio.get_running_loop()
    user = settings.user or image.user
    container = Container(command_line, name, settings.folder or image.folder or DEFAULT_FOLDER, user)
    async with _starting.setdefault(loop, asyncio.Semaphore(MAX_STARTING)):
        try:
            arguments = _run_arguments(settings, image=image, name=name)
            # A runtime that is killed while it starts a container leaves one that can be neither used nor removed.
            await run_shielded(lambda: _run(command_line, arguments, settings), timeout_s=START_TIMEOUT_S)
            if container.folder != image.folder or settings.user:
                await _make_folder(container, user=settings.user or image.user)
        except BaseException:
            await run_shielded(container.remove, timeout_s=COMMAND_TIMEOUT_S)
            raise
    return container


async def remove_containers(command_line: CommandLine, names: list[str]) -> None:
    """Remove containers with all of their processes. Containers that do not exist count as removed."""
    without_grace = ["--time", "0"] if command_line.runtime == "podman" else []
    result = await command_line.run("rm", "--force", "--volumes", *without_grace, *names)
    if result.exit_code and not _is_gone(result):
        # Removing a container while it ends by itself can fail once.
        result = await command_line.run("rm", "--force", "--volumes", *without_grace, *names)
    if result.exit_code and not _is_gone(result):
        raise WorkspaceError(f"{command_line.runtime} cannot remove {' '.join(names)}: {last_lines(result)}")


def _run_arguments(settings: ContainerSettings, *, image: Image, name: str) -> list[str]:
    arguments = ["run", "--detach", "--rm", "--name", name, "--hostname", "workspace"]
    arguments += ["--label", f"{RUN_LABEL}={name}", "--label", f"{OWNER_LABEL}={this_process().token}"]
    arguments += ["--network", "host" if settings.network == "host" else "none"]
    limits = {"--cpus": settings.cpus, "--memory": settings.memory, "--pids-limit": settings.pids}
    for option, value in limits.items():
        if value is not None:
            arguments += [option, str(value)]
    if settings.user:
        arguments += ["--user", settings.user]
    for mount in settings.mounts:
        source, colon, target = mount.partition(":")
        is_path = source.startswith(".")  # other names are those of volumes, or absolute
        arguments += ["--volume", (os.path.abspath(source) if is_path else source) + colon + target]
    script = WAIT_SCRIPT.format(seconds=round(settings.lifetime_s))
    return [*arguments, *settings.run_args, "--entrypoint", "sh", image.name, "-c", script]


async def _run(command_line: CommandLine, arguments: list[str], settings: ContainerSettings) -> None:
    result = await command_line.run(*arguments, timeout_s=START_TIMEOUT_S)
    if result.exit_code:
        reason = last_lines(result)
        if "executable file" in reason:
            reason += "; the image needs the program sh"
        names_limits = re.search(r"cgroup|controller|resource limit", reason, re.IGNORECASE)
        if names_limits and (settings.cpus or settings.memory or settings.pids):
            reason += "; leave out the limit of workspace.container (cpus, memory, pids) that this machine cannot set"
        raise WorkspaceError(f"{command_line.runtime} cannot start a container: {reason}")
    if result.stderr.strip():
        _warn(f"{command_line.runtime} run: {result.stderr.strip()}")


@cache
def _warn(message: str) -> None:
    """Log what the runtime says about containers that it started, such as limits that it ignores. Log it once."""
    logger.warning(message)


async def _make_folder(container: Container, *, user: str) -> None:
    """Make the working folder, owned by the user of commands."""
    made = await container.command_line.run(
        "exec", "--user", "0", container.name, "sh", "-c", FOLDER_SCRIPT, "sh", container.folder, user
    )
    if made.exit_code:
        raise WorkspaceError(
            f"the folder {container.folder} cannot be made in the container: {last_lines(made)}"
        )


def _is_gone(result: CommandResult) -> bool:
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    return all(
        re.search(r"no such container|no container with|already in progress", line, re.I) for line in lines
    )


KILL_SCRIPT = """
for round in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19; do
    found=
    for file in $(grep -ls -e "$1" /proc/[0-9]*/environ); do
        number=${file#/proc/}
        found="$found ${number%/environ}"
    done
    [ -z "$found" ] && exit 0
    kill -9 $found 2>/dev/null
done
exit 1
"""
"""Kills all processes whose environment has a mark, until none is found. Processes may fork while they are killed."""


async def kill_marked(container: Container, mark: str) -> bool:
    """Kill the processes of a container whose environment has a mark. Return whether all have ended."""
    arguments = ["exec", "--user", "0", "--privileged", container.name, "sh", "-c", KILL_SCRIPT, "sh", mark]
    result = await container.command_line.run(*arguments, timeout_s=30.0)
    return result.exit_code == 0


WAIT_S = 0.1
WAIT_ROUNDS = 300
"""How often starting containers are waited for, at most."""

_removed: set[CommandLine] = set()
"""Runtimes whose orphans this process has removed."""
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def remove_orphans_once(command_line: CommandLine) -> None:
    """Remove the orphans of a runtime, unless this process has removed them before."""
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        if command_line not in _removed:
            await remove_orphaned_containers(command_line)
            _removed.add(command_line)


async def remove_orphaned_containers(command_line: CommandLine) -> list[str]:
    """Remove the containers whose owner is dead, and return their names.

    Containers that are being started are waited for. Containers of processes on other machines and in other
    containers are kept, since their owners may live.
    """
    for _ in range(WAIT_ROUNDS):
        if not await run_in_thread(num_spared_orphans):
            break
        await asyncio.sleep(WAIT_S)
    everything = ["--external"] if command_line.runtime == "podman" else []
    listed = await command_line.output("ps", "--all", *everything, "--format", "{{.Names}}")
    names = [name for name in listed.split() if (owner := parse_owner(name)) is not None and owner.is_dead]
    if names:
        await remove_containers(command_line, names)
    return names
