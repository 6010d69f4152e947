"""Opens workspaces by their settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from agent_loop.errors import ConfigError, WorkspaceError
from agent_loop.loading import load_object
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.describe import describe_error, describe_value
from agent_loop.runtime.owner import kill_orphans
from agent_loop.runtime.threads import run_in_thread
from agent_loop.workspaces.base import Workspace, WorkspaceProvider
from agent_loop.workspaces.container.pool import ContainerProvider
from agent_loop.workspaces.folder import FolderProvider, GitProvider, new_name, remove_orphaned_folders
from agent_loop.workspaces.settings import WorkspaceSettings, read_workspace

STOP_TIMEOUT_S = 120.0


@asynccontextmanager
async def open_workspace(
    settings: WorkspaceSettings | Mapping[str, Any], *, key: str = ""
) -> AsyncGenerator[Workspace]:
    """Start a workspace, and stop it at the end, also after a failure or a cancellation.

    The first workspace of a process also removes the processes, containers and folders that killed processes left.

    Args:
        settings: The settings.
        key: Letters and digits that identify the trajectory. A folder of this machine with the same key has the same
            path in a later process.

    Raises:
        ConfigError: A setting is wrong.
        WorkspaceError: The workspace cannot be started.
    """
    workspace = await start_workspace(read_workspace(settings), key=key)
    try:
        yield workspace
    finally:
        await run_shielded(workspace.stop, timeout_s=STOP_TIMEOUT_S)


async def start_workspace(settings: WorkspaceSettings, *, key: str = "") -> Workspace:
    """Start a workspace. The caller has to stop it."""
    provider = _provider(settings.model_copy(update={"check": None}).model_dump_json())
    try:
        async with asyncio.timeout(settings.start_timeout_s):
            await run_in_thread(_remove_orphans)
            await provider.remove_orphans()
            return await _start(provider, settings, key=key)
    except TimeoutError as error:
        raise WorkspaceError(
            f"the workspace did not start within {settings.start_timeout_s:g} s; raise workspace.start_timeout_s"
        ) from error


async def _start(provider: WorkspaceProvider, settings: WorkspaceSettings, *, key: str) -> Workspace:
    workspace: Any = await provider.start(new_name(key))
    if not isinstance(workspace, Workspace):
        raise ConfigError(
            f"start of provider {settings.provider} returned {describe_value(workspace)}; return a Workspace"
        )
    if not (settings.container or settings.provider):
        return workspace
    try:
        if settings.folder:
            await workspace.put(Path(settings.folder), workspace.folder)
        elif settings.git is not None:
            git = WorkspaceSettings(git=settings.git, start_timeout_s=settings.start_timeout_s)
            async with open_workspace(git) as files:
                await workspace.put(Path(files.folder), workspace.folder)
    except BaseException:
        await run_shielded(workspace.stop, timeout_s=STOP_TIMEOUT_S)
        raise
    return workspace


@cache
def _provider(settings_json: str) -> WorkspaceProvider:
    """Return the provider of settings, which all trajectories of this process share."""
    settings = WorkspaceSettings.model_validate_json(settings_json)
    if settings.container is not None:
        container = settings.container
        return ContainerProvider(container.model_copy(update={"env": {**settings.env, **container.env}}))
    if settings.provider:
        return _load_provider(settings)
    if settings.git is not None:
        return GitProvider(settings.git, env=settings.env)
    return FolderProvider(Path(settings.folder) if settings.folder else None, env=settings.env)


def _load_provider(settings: WorkspaceSettings) -> WorkspaceProvider:
    key = "workspace.provider"
    make = load_object(settings.provider, key=key)
    if not (isinstance(make, type) and issubclass(make, WorkspaceProvider)):
        raise ConfigError(
            f"{key} is {settings.provider!r}, which is {describe_value(make)}; name a subclass of WorkspaceProvider"
        )
    try:
        return make(**settings.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key} {settings.provider} with options {dict(settings.options)!r} raised {describe_error(error)}"
        ) from error


_removing_orphans = Lock()


def _remove_orphans() -> None:
    """Kill processes and remove folders of dead owners, once per process. Return when they are gone."""
    with _removing_orphans:
        _remove_orphans_once()


@cache
def _remove_orphans_once() -> None:
    kill_orphans()
    remove_orphaned_folders()
