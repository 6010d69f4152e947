"""A workspace that is a container. Files are copied into and out of it as tar archives."""

from __future__ import annotations

import logging
import posixpath
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit
from uuid import uuid4

from agent_loop.errors import WorkspaceError, WorkspaceFileMissing
from agent_loop.runtime.child_process import CommandResult
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.owner import OWNER_VARIABLE
from agent_loop.runtime.threads import run_in_thread
from agent_loop.workspaces.base import NO_VARIABLES, Workspace
from agent_loop.workspaces.container.command_line import last_lines
from agent_loop.workspaces.container.container import Container, kill_marked
from agent_loop.workspaces.container.gateway_access import Forwarder, open_listener
from agent_loop.workspaces.folder import copy, target_of
from agent_loop.workspaces.settings import Network

logger = logging.getLogger(__name__)

MAX_BYTES = 2**33
"""Size of the largest archive that is copied out of a container."""


def pack(source: Path, target: str, file: BinaryIO, *, owner: tuple[int, int]) -> None:
    """Write a file or a folder as an archive that is extracted at the root folder."""

    def owned(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid, info.gid = owner
        info.uname = info.gname = ""
        return info

    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(source.resolve(), posixpath.normpath(target).lstrip("/") or ".", filter=owned)


def unpack(file: BinaryIO, target: Path) -> None:
    """Extract the one file or folder of an archive to a path, and merge it with a folder that exists.

    Files that would be written elsewhere, links that lead elsewhere and devices are left out, which is logged.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tarfile.open(fileobj=file) as archive:
            archive.extractall(folder, filter=_without_escapes)
        [extracted] = folder.iterdir()
        copy(extracted, target)
        shutil.rmtree(extracted, ignore_errors=True)


def bounded_writer(file: BinaryIO) -> Callable[[bytes], None]:
    """Return a function that writes to a file and discards what exceeds `MAX_BYTES`."""

    def write(data: bytes) -> None:
        if file.tell() <= MAX_BYTES:
            file.write(data)

    return write


def _without_escapes(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    try:
        return tarfile.data_filter(member, path)
    except tarfile.FilterError as error:
        logger.warning("%s is not copied out of the workspace: %s", member.name, error)
        return None


COPY_TIMEOUT_S = 600.0
CLEANUP_TIMEOUT_S = 60.0
LOOPBACK_HOSTS = ("127.0.0.1", "localhost")
SUSPICIOUS_CODES = (125, 126, 127, 137, 143, 255)
"""Exit codes that the runtime also uses for its own failures, or that a container that was killed causes."""
VARIABLES_OF_THE_RUNTIME = re.compile(
    r"PATH|HOME|USER|TMPDIR|LD_.*|XDG_.*|DOCKER_.*|CONTAINER.*|BUILDAH_.*|_"
)
"""Variables that change what the runtime's program does. Their values are given as arguments instead."""


class ContainerWorkspace(Workspace):
    """A container of one trajectory."""

    def __init__(self, container: Container, *, network: Network, env: Mapping[str, str]) -> None:
        self.folder = container.folder
        self._container = container
        self._command_line = container.command_line
        self._network = network
        self._env = dict(env)
        self._forwarders: dict[int, Forwarder] = {}
        self._owner: tuple[int, int] | None = None
        self._is_stopped = False

    @property
    def name(self) -> str:
        """Name of the container."""
        return self._container.name

    async def exec(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] = NO_VARIABLES,
        folder: str | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> CommandResult:
        mark = f"{self.name}.{uuid4().hex[:8]}"
        variables = {**self._env, **env, OWNER_VARIABLE: mark}
        arguments = ["exec", *(["--interactive"] if stdin else []), "--workdir", self._path(folder or "")]
        if self._container.user:
            arguments += ["--user", self._container.user]
        arguments += _options_of(variables)
        has_ended = False
        try:
            result = await self._command_line.run(
                *arguments,
                self.name,
                *command,
                env={name: value for name, value in variables.items() if not _is_given_as_argument(name)},
                stdin=stdin,
                timeout_s=timeout_s,
            )
            has_ended = not result.timed_out and result.exit_code >= 0
        finally:
            if not has_ended:
                await run_shielded(lambda: self._end_command(mark), timeout_s=CLEANUP_TIMEOUT_S)
        if not result.timed_out and (result.exit_code < 0 or result.exit_code in SUSPICIOUS_CODES):
            await self._check_result(command, result)
        return result

    async def put(self, source: Path, target: str) -> None:
        path = self._path(target_of(source, target))
        owner = await self._owner_of_files()
        with tempfile.TemporaryFile() as file:
            try:
                await run_in_thread(pack, source, path, file, owner=owner)
            except OSError as error:
                raise WorkspaceError(f"{source} cannot be put into the workspace: {error}") from error
            file.seek(0)
            await self._copy(["-", f"{self.name}:/"], what=f"{source} cannot be put at {path}", stdin=file)

    async def get(self, source: str, target: Path) -> None:
        path = self._path(source)
        with tempfile.TemporaryFile() as file:
            await self._copy([f"{self.name}:{path}", "-"], what=f"{path} cannot be copied", stdout=file)
            if file.tell() > MAX_BYTES:
                raise WorkspaceError(f"{path} has more than {MAX_BYTES} bytes; copy a part of it")
            file.seek(0)
            try:
                await run_in_thread(unpack, file, target)
            except (OSError, tarfile.TarError, ValueError) as error:
                raise WorkspaceError(f"{path} cannot be copied to {target}: {error}") from error

    async def reach(self, url: str) -> str:
        if self._network == "host":
            return url
        if self._network == "none":
            raise WorkspaceError(
                f"programs in the container cannot reach {url}; set workspace.container.network to 'gateway'"
            )
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if port not in self._forwarders:
            self._forwarders[port] = await self._open_forwarder(parts.hostname or "127.0.0.1", port)
        if parts.hostname in LOOPBACK_HOSTS:
            return url
        return parts._replace(netloc=f"127.0.0.1:{port}").geturl()

    async def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        try:
            for forwarder in self._forwarders.values():
                await forwarder.close()
        finally:
            await self._container.remove()

    async def _open_forwarder(self, host: str, port: int) -> Forwarder:
        pid = await self._command_line.output("inspect", "--format", "{{.State.Pid}}", self.name)
        if not pid.isdigit() or pid == "0":
            raise WorkspaceError(f"the container {self.name} has ended")
        listener = await open_listener(int(pid), port, runtime=self._command_line.runtime)
        forwarder = Forwarder(host, port)
        try:
            await forwarder.open(listener)
        except BaseException:
            listener.close()
            raise
        return forwarder

    async def _end_command(self, mark: str) -> None:
        """Kill the processes of a command. End the container if that fails."""
        if not await kill_marked(self._container, mark):
            await self._container.remove()

    async def _check_result(self, command: Sequence[str], result: CommandResult) -> None:
        """Raise an error if the runtime, and not the command, failed."""
        if not await self._container.is_running():
            raise WorkspaceError(f"the container {self.name} has ended: {last_lines(result)}")
        if result.exit_code < 0:
            raise WorkspaceError(
                f"the runtime's program was ended by signal {-result.exit_code} while a command ran"
            )
        is_of_runtime = re.search(r"^(Error: |OCI runtime|docker: )", result.stderr, re.MULTILINE)
        if is_of_runtime and result.exit_code in (125, 126, 127, 255):
            raise WorkspaceError(f"command {list(command)!r} cannot be started: {last_lines(result)}")

    async def _copy(
        self,
        arguments: list[str],
        *,
        what: str,
        stdin: BinaryIO | None = None,
        stdout: BinaryIO | None = None,
    ) -> None:
        result = await self._command_line.run(
            "cp",
            "--archive",
            *arguments,
            stdin=stdin or b"",
            timeout_s=COPY_TIMEOUT_S,
            stdout_sink=None if stdout is None else bounded_writer(stdout),
        )
        if not result.exit_code:
            return
        reason = last_lines(result)
        if not await self._container.is_running():
            raise WorkspaceError(f"the container {self.name} has ended: {reason}")
        if stdout is not None and re.search(r"no such file|could not (be found|find)", reason, re.IGNORECASE):
            raise WorkspaceFileMissing(f"the workspace has no {arguments[0].partition(':')[2]}")
        raise WorkspaceError(f"{what}: {reason}")

    async def _owner_of_files(self) -> tuple[int, int]:
        """Return the user and group id of files that are put into the container."""
        if not self._container.user:
            return 0, 0
        if self._owner is None:
            found = await self.exec(["sh", "-c", "id -u && id -g"], folder="/")
            if found.exit_code:
                raise WorkspaceError(
                    f"the ids of user {self._container.user!r} are unknown: {last_lines(found)}"
                )
            user, group = found.stdout.split()
            self._owner = int(user), int(group)
        return self._owner

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.folder, path))


def _is_given_as_argument(name: str) -> bool:
    return VARIABLES_OF_THE_RUNTIME.fullmatch(name) is not None or name == OWNER_VARIABLE


def _options_of(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the options that set environment variables. Values stay out of the list of processes if possible."""
    for name, value in variables.items():
        if "=" in name or "\0" in name + value or not name:
            raise WorkspaceError(f"{name!r} cannot be the name of an environment variable; rename it")
        yield "--env"
        yield f"{name}={value}" if _is_given_as_argument(name) else name
