"""Starts workspaces in containers."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from agent_loop.workspaces.base import Workspace, WorkspaceProvider
from agent_loop.workspaces.container.command_line import CommandLine
from agent_loop.workspaces.container.container import Container, start_container
from agent_loop.workspaces.container.images import Image, prepare_image
from agent_loop.workspaces.container.orphans import remove_orphans_once
from agent_loop.workspaces.container.pool import WarmPool
from agent_loop.workspaces.container.workspace import ContainerWorkspace
from agent_loop.workspaces.root import new_name
from agent_loop.workspaces.settings import ContainerSettings


class ContainerProvider(WorkspaceProvider):
    """Starts one container for each trajectory, or takes one that was started ahead.

    Args:
        settings: The image, the limits and the network.
    """

    def __init__(self, settings: ContainerSettings) -> None:
        self._settings = settings
        self._command_line = CommandLine(settings.runtime, settings.runtime_args)
        self._image: Image | None = None
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self.pool = WarmPool(self._start_ahead, size=settings.pool)

    async def remove_orphans(self) -> None:
        await remove_orphans_once(self._command_line)

    async def start(self, name: str) -> Workspace:
        container = await self.pool.take() if self._settings.pool else None
        container = container or await self._start(name)
        return ContainerWorkspace(container, network=self._settings.network, env=self._settings.env)

    async def _start_ahead(self) -> Container:
        return await self._start(new_name())

    async def _start(self, name: str) -> Container:
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if self._image is None:
                self._image = await prepare_image(self._command_line, self._settings)
        return await start_container(self._command_line, self._settings, image=self._image, name=name)
