"""Base classes of workspaces and of their providers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_loop.runtime.child_process import CommandResult

NO_VARIABLES: Mapping[str, str] = {}


class Workspace(ABC):
    """Place in which the programs and tools of one trajectory work. Used by one trajectory, then stopped."""

    folder: str
    """Absolute path of the working folder, as programs inside see it."""
    home: str = "/tmp/agent-home"
    """Absolute path for files of programs that do not belong to the task, such as their settings. It need not exist.
    A workspace that shares its machine with others has a path of its own."""

    @abstractmethod
    async def exec(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] = NO_VARIABLES,
        folder: str | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> CommandResult:
        """Run a command until it exits. Kill it with its child processes at the time limit and on cancellation.

        Args:
            command: The program and its arguments.
            env: Variables added to those of the workspace.
            folder: Working folder of the command. A relative path begins at `self.folder`, the default.
            stdin: Standard input.
            timeout_s: Time limit. The result says whether it has passed.

        Raises:
            WorkspaceError: The command cannot be started, or the workspace has ended.
        """

    @abstractmethod
    async def put(self, source: Path, target: str) -> None:
        """Copy a file or a folder into the workspace.

        Args:
            source: A file, or a folder, whose contents are merged into the target folder.
            target: Path of the copy, or of the folder for a file if it ends with `/`. A relative path begins at
                `self.folder`. Missing parent folders are created.

        Raises:
            WorkspaceError: The source does not exist, or the workspace refused it or has ended.
        """

    @abstractmethod
    async def get(self, source: str, target: Path) -> None:
        """Copy a file or a folder out of the workspace, as `put` does in the other direction.

        Raises:
            WorkspaceFileMissing: The source does not exist.
            WorkspaceError: The copy failed, or the workspace has ended.
        """

    async def reach(self, url: str) -> str:
        """Return the URL at which programs inside reach a local HTTP service, such as the gateway.

        Raises:
            WorkspaceError: Programs inside cannot reach the service.
        """
        return url

    @abstractmethod
    async def stop(self) -> None:
        """End all processes of the workspace and remove its files. A second call does nothing."""


class WorkspaceProvider(ABC):
    """Starts workspaces. Named as `provider: module:Class`, and created with the keys of `options` as arguments."""

    @abstractmethod
    async def start(self, name: str) -> Workspace:
        """Start the workspace of one trajectory.

        Args:
            name: Unique name, which begins with the token of the owner (`agent_loop.runtime.owner`), so that a later
                process can remove what a killed one left.

        Raises:
            WorkspaceError: It cannot be started. The trajectory fails.
        """

    async def remove_orphans(self) -> None:
        """Remove workspaces whose owner is dead. Called before the first `start`; does nothing by default."""
