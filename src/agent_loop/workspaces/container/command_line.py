"""The command line of Podman or Docker, and the images of containers."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from agent_loop.errors import ConfigError, WorkspaceError
from agent_loop.runtime.child_process import CommandResult, run_command
from agent_loop.runtime.owner import OWNER_VARIABLE, SPARED_SUFFIX, this_process
from agent_loop.runtime.threads import run_in_thread
from agent_loop.workspaces.folder import root_folder
from agent_loop.workspaces.settings import ContainerSettings

COMMAND_TIMEOUT_S = 120.0
"""Time limit of commands that need neither the network nor a build."""


@dataclass(frozen=True)
class CommandLine:
    """Runs commands of one container runtime."""

    runtime: str
    """`podman` or `docker`."""
    arguments: tuple[str, ...] = ()
    """Arguments before the subcommand."""

    @cached_property
    def program(self) -> str:
        """Path of the runtime's program."""
        path = shutil.which(self.runtime)
        if path is None:
            raise ConfigError(
                f"workspace.container.runtime is {self.runtime!r}, which is not installed; install it, or name the "
                "other one of podman and docker"
            )
        return path

    async def run(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        stdin: bytes | BinaryIO = b"",
        timeout_s: float | None = COMMAND_TIMEOUT_S,
        stdout_sink: Callable[[bytes], object] | None = None,
    ) -> CommandResult:
        """Run a command of the runtime, such as `exec`, and return its result, also if it failed."""
        return await run_command(
            [self.program, *self.arguments, *arguments],
            env={**os.environ, **(env or {}), OWNER_VARIABLE: _owner_of(arguments[0])},
            stdin=stdin,
            cwd=tempfile.gettempdir(),  # conmon writes a file into it when a container exceeds its memory
            timeout_s=timeout_s,
            stdout_sink=stdout_sink,
        )

    async def output(self, *arguments: str, timeout_s: float | None = COMMAND_TIMEOUT_S) -> str:
        """Run a command that has to succeed, and return its output."""
        result = await self.run(*arguments, timeout_s=timeout_s)
        if result.exit_code:
            raise WorkspaceError(f"{self.describe(arguments)} failed: {last_lines(result)}")
        return result.stdout.strip()

    def describe(self, arguments: Sequence[str]) -> str:
        """Return the start of a command, for errors."""
        return " ".join([self.runtime, *arguments[:1]])


def _owner_of(subcommand: str) -> str:
    """Return the mark of a command. A container whose start or removal was interrupted cannot be removed later."""
    return this_process().token + (SPARED_SUFFIX if subcommand in ("run", "rm") else "")


def last_lines(result: CommandResult, *, num_lines: int = 3) -> str:
    """Return why a command failed: the last lines that it wrote."""
    if result.timed_out:
        return "it exceeded its time limit"
    text = result.stderr.strip() or result.stdout.strip() or f"exit status {result.exit_code}"
    return "\n".join(text.splitlines()[-num_lines:])


REPOSITORY = "localhost/agent-loop-build"
LOCK_POLL_S = 0.2
SHOWN_LINES = 40


@dataclass(frozen=True, slots=True)
class Image:
    """An image that the runtime has."""

    name: str
    folder: str
    """Working folder that the image sets, or an empty string."""
    user: str
    """User that the image sets, or an empty string for root."""


async def prepare_image(command_line: CommandLine, settings: ContainerSettings) -> Image:
    """Build or pull the image, unless the runtime has it."""
    if settings.image:
        found = await _inspect(command_line, settings.image)
        if found is not None:
            return found
        pulled = await command_line.run("pull", "--quiet", settings.image, timeout_s=None)
        if pulled.exit_code:
            raise WorkspaceError(
                f"workspace.container.image is {settings.image!r}, which {command_line.runtime} neither has nor can "
                f"pull: {last_lines(pulled)}"
            )
        return await _inspect_existing(command_line, settings.image)
    dockerfile = _find_dockerfile(settings.dockerfile)
    digest = await run_in_thread(_hash_of, dockerfile, settings.build_args)
    tag = f"{REPOSITORY}:{digest}"
    async with _locked(digest):
        found = await _inspect(command_line, tag)
        if found is not None:
            return found
        await _build(command_line, settings, dockerfile=dockerfile, tag=tag)
    return await _inspect_existing(command_line, tag)


async def _build(
    command_line: CommandLine, settings: ContainerSettings, *, dockerfile: Path, tag: str
) -> None:
    arguments = ["build", "--tag", tag, "--file", str(dockerfile), *settings.build_options]
    for name, value in settings.build_args.items():
        arguments += ["--build-arg", f"{name}={value}"]
    built = await command_line.run(*arguments, str(dockerfile.parent), timeout_s=None)
    if built.exit_code:
        lines = f"{built.stdout}\n{built.stderr}".strip().splitlines()[-SHOWN_LINES:]
        raise WorkspaceError(f"{command_line.runtime} cannot build {dockerfile}:\n" + "\n".join(lines))


async def _inspect(command_line: CommandLine, name: str) -> Image | None:
    result = await command_line.run(
        "image", "inspect", "--format", "{{.Config.WorkingDir}}\n{{.Config.User}}", name
    )
    if result.exit_code:
        return None
    folder, user, *_ = [*result.stdout.split("\n"), "", ""]
    return Image(name, "" if folder.strip() == "/" else folder.strip(), user.strip())


async def _inspect_existing(command_line: CommandLine, name: str) -> Image:
    found = await _inspect(command_line, name)
    if found is None:
        raise WorkspaceError(f"{command_line.runtime} does not have the image {name} that it has just made")
    return found


def _find_dockerfile(path: str) -> Path:
    found = Path(path).resolve()
    if found.is_dir():
        found = next(
            (found / name for name in ("Dockerfile", "Containerfile") if (found / name).is_file()), found
        )
    if not found.is_file():
        raise WorkspaceError(
            f"workspace.container.dockerfile is {path!r}, which is neither a Dockerfile nor a folder with one"
        )
    return found


def _hash_of(dockerfile: Path, build_args: Mapping[str, str]) -> str:
    """Return a hash of what a build depends on: arguments, and the files next to the Dockerfile with their modes."""
    digest = hashlib.sha256(repr((dockerfile.name, sorted(build_args.items()))).encode())
    for folder, folders, files in os.walk(dockerfile.parent):
        folders.sort()
        for name in sorted([*files, *(each for each in folders if Path(folder, each).is_symlink())]):
            path = Path(folder, name)
            executable = not path.is_symlink() and os.access(path, os.X_OK)
            digest.update(repr((str(path.relative_to(dockerfile.parent)), executable)).encode())
            digest.update(str(path.readlink()).encode() if path.is_symlink() else path.read_bytes())
        digest.update(repr(folders).encode())
    return digest.hexdigest()[:32]


@asynccontextmanager
async def _locked(digest: str) -> AsyncGenerator[None]:
    """Let one process at a time build an image."""
    folder = root_folder() / "builds"
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder / digest, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            await asyncio.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)
