"""Images of containers: pulled by name, or built once for each content of their folder."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agent_loop.errors import WorkspaceError
from agent_loop.runtime.threads import run_in_thread
from agent_loop.workspaces.container.command_line import CommandLine, last_lines
from agent_loop.workspaces.root import root_folder
from agent_loop.workspaces.settings import ContainerSettings

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
    """Build or pull the image, unless the runtime has it.

    Raises:
        WorkspaceError: The image cannot be built or pulled. The message has the end of the build's output.
    """
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
