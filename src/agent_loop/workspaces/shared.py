"""One workspace for all tools of a trajectory: started at its first use, stopped after its last user."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from agent_loop.errors import ConfigError
from agent_loop.tools.base import trajectory_of
from agent_loop.workspaces.base import Workspace
from agent_loop.workspaces.check import check_reward
from agent_loop.workspaces.factory import start_workspace
from agent_loop.workspaces.settings import WorkspaceSettings, read_workspace, workspace_mapping

_workspaces: dict[str, SharedWorkspace] = {}
"""Workspaces in use, by trajectory."""


class SharedWorkspace:
    """Workspace of one trajectory, which several tools use.

    Args:
        settings: Settings of the workspace.
    """

    def __init__(self, settings: WorkspaceSettings) -> None:
        self._settings = settings
        self._users: set[str] = set()
        self._workspace: Workspace | None = None
        self._lock = asyncio.Lock()

    @staticmethod
    def acquire(instance_id: str, *, config: Mapping[str, Any], of_row: Any) -> None:
        """Register a tool's instance as a user of its trajectory's workspace. The workspace is not started yet.

        Args:
            instance_id: Id of the instance.
            config: Settings of the workspace from the tool's config.
            of_row: Settings from the row, whose keys replace those of the config.

        Raises:
            ConfigError: A setting is wrong, or there are none.
        """
        trajectory = trajectory_of(instance_id)
        if trajectory not in _workspaces:
            row = {} if of_row is None else workspace_mapping(of_row, where="the row's workspace")
            merged = {**config, **row}
            if not merged:
                raise ConfigError(
                    "there is no workspace; give the row a column workspace, or the tool a config with workspace"
                )
            _workspaces[trajectory] = SharedWorkspace(read_workspace(merged))
        _workspaces[trajectory]._users.add(instance_id)

    @staticmethod
    def of(instance_id: str) -> SharedWorkspace:
        """Return the workspace that an instance has acquired."""
        return _workspaces[trajectory_of(instance_id)]

    @staticmethod
    async def release(instance_id: str) -> None:
        """Stop the workspace after its last user."""
        shared = _workspaces.get(trajectory_of(instance_id))
        if shared is None:
            return
        shared._users.discard(instance_id)
        if shared._users:
            return
        del _workspaces[trajectory_of(instance_id)]
        async with shared._lock:
            if shared._workspace is not None:
                await shared._workspace.stop()

    async def started(self) -> Workspace:
        """Return the workspace, and start it before its first use.

        Raises:
            WorkspaceError: It cannot be started.
        """
        async with self._lock:
            if self._workspace is None:
                self._workspace = await start_workspace(self._settings)
            return self._workspace

    async def reward(self) -> float | None:
        """Return the reward of the workspace's check; None without a check.

        Raises:
            WorkspaceError: The check cannot be run.
        """
        if self._settings.check is None:
            return None
        score = await check_reward(await self.started(), self._settings.check)
        return score.reward


def num_shared() -> int:
    """Return the number of workspaces that tools use."""
    return len(_workspaces)
