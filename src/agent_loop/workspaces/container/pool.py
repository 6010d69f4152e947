"""Starts workspaces in containers, some of them ahead."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any
from weakref import WeakKeyDictionary

from agent_loop.errors import AgentLoopError
from agent_loop.workspaces.base import Workspace, WorkspaceProvider
from agent_loop.workspaces.container.command_line import CommandLine, Image, prepare_image
from agent_loop.workspaces.container.container import Container, remove_orphans_once, start_container
from agent_loop.workspaces.container.workspace import ContainerWorkspace
from agent_loop.workspaces.folder import new_name
from agent_loop.workspaces.settings import ContainerSettings

logger = logging.getLogger(__name__)

MAX_WARM = 64
"""Containers that a process keeps ahead, for all settings together."""
CLOSE_TIMEOUT_S = 60.0

_pools: list[WarmPool] = []
"""Pools of this process, the last used one at the end."""
_lock = threading.RLock()


class WarmPool:
    """Containers with the same settings that wait for a trajectory.

    The pool is filled by a thread, so that it outlasts the event loops that use it. `close_pools` removes its
    containers when the process ends.
    """

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Container]], *, size: int) -> None:
        self._start = start
        self._size = size
        self._warm: list[Container] = []
        self._filler: threading.Thread | None = None
        self.is_closed = False

    @property
    def num_warm(self) -> int:
        """Number of containers that wait."""
        return len(self._warm)

    async def take(self) -> Container | None:
        """Return a running container, or None if none is ready. Start others in the background."""
        taken: Container | None = None
        while taken is None and self._warm:
            with _lock:
                taken = self._warm.pop(0) if self._warm else None
            if taken is not None and not await taken.is_running():
                taken = None
        self.fill()
        return taken

    def fill(self) -> None:
        """Start containers in the background until there are `size`."""
        with _lock:
            if self in _pools:
                _pools.remove(self)
            _pools.append(self)
            if self.is_closed or self._filler is not None or self.num_warm >= self._size:
                return
            self._filler = threading.Thread(target=self._fill, name="warm containers", daemon=True)
            self._filler.start()

    def close(self) -> None:
        """Remove the containers that wait. The pool is filled again when a trajectory uses it."""
        self.is_closed = True
        filler = self._filler
        if filler is not None:
            filler.join(CLOSE_TIMEOUT_S)
        while self._warm:
            asyncio.run(self._warm.pop().remove())
        self.is_closed = False

    def _fill(self) -> None:
        try:
            while self._has_room():
                container = asyncio.run(self._start())
                with _lock:
                    self._warm.append(container)
        except AgentLoopError as error:
            # The trajectory that needs the container starts it itself, and fails with the error.
            logger.warning("no container can be started ahead: %s", error)
        finally:
            with _lock:
                self._filler = None

    def _has_room(self) -> bool:
        """Return whether another container is to be started. Make room by removing one of the pool not used longest."""
        surplus: Container | None = None
        with _lock:
            if self.is_closed or self.num_warm >= self._size:
                return False
            if sum(pool.num_warm for pool in _pools) >= MAX_WARM:
                other = next((pool for pool in _pools if pool is not self and pool.num_warm), None)
                if other is None:
                    return False
                surplus = other._warm.pop(0)
        if surplus is not None:
            asyncio.run(surplus.remove())
        return True


def close_pools() -> None:
    """Remove all containers that wait. Called when the process ends."""
    with _lock:
        pools = list(_pools)
        _pools.clear()
    for pool in pools:
        pool.is_closed = True
    for pool in pools:
        try:
            pool.close()
        except AgentLoopError as error:
            logger.warning("%s; the next start removes it", error)


def _close_in_this_process(pid: int = os.getpid()) -> None:
    if os.getpid() == pid:
        close_pools()


atexit.register(_close_in_this_process)


class ContainerProvider(WorkspaceProvider):
    """Starts one container for each trajectory, or takes one that was started ahead."""

    def __init__(self, settings: ContainerSettings) -> None:
        self._settings = settings
        self._command_line = CommandLine(settings.runtime, settings.runtime_args)
        self._image: Image | None = None
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self.pool = WarmPool(lambda: self._start(new_name()), size=settings.pool)

    async def remove_orphans(self) -> None:
        await remove_orphans_once(self._command_line)

    async def start(self, name: str) -> Workspace:
        container = await self.pool.take() if self._settings.pool else None
        container = container or await self._start(name)
        return ContainerWorkspace(container, network=self._settings.network, env=self._settings.env)

    async def _start(self, name: str) -> Container:
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if self._image is None:
                self._image = await prepare_image(self._command_line, self._settings)
        return await start_container(self._command_line, self._settings, image=self._image, name=name)
