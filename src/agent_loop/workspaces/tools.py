"""The tools `shell` and `edit_file`, which work in the trajectory's workspace."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from agent_loop.config.validation import parse_section
from agent_loop.config.values import PositiveSeconds, Section
from agent_loop.errors import ConfigError, ToolError, WorkspaceError, WorkspaceFileMissing
from agent_loop.runtime.child_process import CommandResult
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import BaseTool, ToolResponse, trajectory_of
from agent_loop.workspaces.base import Workspace
from agent_loop.workspaces.check import check_reward
from agent_loop.workspaces.factory import start_workspace
from agent_loop.workspaces.settings import WorkspaceSettings, read_workspace, workspace_mapping


@dataclass(slots=True)
class SharedWorkspace:
    """Workspace of one trajectory, which several tools use."""

    settings: WorkspaceSettings
    users: set[str] = field(default_factory=set[str])
    """Instance ids of the tools."""
    workspace: Workspace | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def started(self) -> Workspace:
        """Return the workspace, and start it before its first use."""
        async with self.lock:
            if self.workspace is None:
                self.workspace = await start_workspace(self.settings)
            return self.workspace


_workspaces: dict[str, SharedWorkspace] = {}
"""Workspaces in use, by trajectory."""


def num_shared() -> int:
    """Return the number of workspaces that tools use."""
    return len(_workspaces)


START_ALLOWANCE_S = 900.0
"""Seconds for starting a workspace, which its own `start_timeout_s` limits, in the first call."""
CLOSE_TIMEOUT_S = 86_400.0
"""Limit of `calc_reward` and `release`. The check and the removal have limits of their own."""
MAX_EDITED_BYTES = 2**20
NO_OUTPUT = "(no output)"

SHELL_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": (
            "Runs a command in a shell and returns its output. Files are kept for later calls. Each call begins in the "
            "working folder, with a new shell. Commands cannot read from a terminal."
        ),
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command to run."}},
            "required": ["command"],
        },
    },
}
EDIT_FILE_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "edit_file",
        "description": (
            "Replaces a text in a file, which must occur exactly once. With an empty old_text, writes new_text as a "
            "new file."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "Path of the file, from the working folder."},
                "old_text": {
                    "type": "string",
                    "description": "The text to replace, or empty for a new file.",
                },
                "new_text": {"type": "string", "description": "The text that takes its place."},
            },
            "required": ["path", "old_text", "new_text"],
        },
    },
}


class WorkspaceToolConfig(Section):
    """Config of the tools."""

    workspace: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Settings of the workspace. Keys of the row's column `workspace` replace them."""
    command_timeout_s: PositiveSeconds = 120.0
    """Time limit of a command."""
    shell: tuple[str, ...] = ("sh", "-c")
    """Program and arguments before the command."""


class WorkspaceTool(BaseTool):
    """Base class of tools that work in the workspace of their trajectory.

    All of them share one workspace, which starts at the first call. Its state is lost when the process dies, so a
    trajectory that used it restarts.
    """

    on_replay = OnReplay.RESTART
    row_columns: Sequence[str] = ("workspace",)
    close_timeout_s = CLOSE_TIMEOUT_S

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema or self.tool_schema)
        self.settings = parse_section(WorkspaceToolConfig, config, where=f"the config of tool {self.name!r}")
        self.timeout_s = self.settings.command_timeout_s + START_ALLOWANCE_S

    @property
    def is_read_later(self) -> bool:
        """True: later calls and the check read the workspace."""
        return True

    async def create(self, instance_id: str, *, workspace: Any = None, **kwargs: Any) -> None:
        """Register a user of the trajectory's workspace. `workspace` holds the row's settings."""
        trajectory = trajectory_of(instance_id)
        if trajectory not in _workspaces:
            row = {} if workspace is None else workspace_mapping(workspace, where="the row's workspace")
            merged = {**self.settings.workspace, **row}
            if not merged:
                raise ConfigError(
                    "there is no workspace; give the row a column workspace, or the tool a config with workspace"
                )
            _workspaces[trajectory] = SharedWorkspace(read_workspace(merged))
        _workspaces[trajectory].users.add(instance_id)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Stop the workspace after its last user."""
        trajectory = trajectory_of(instance_id)
        shared = _workspaces.get(trajectory)
        if shared is None:
            return
        shared.users.discard(instance_id)
        if not shared.users:
            del _workspaces[trajectory]
            async with shared.lock:
                if shared.workspace is not None:
                    await shared.workspace.stop()


class ShellTool(WorkspaceTool):
    """Tool that runs commands in the workspace. Its reward is the one of the workspace's check."""

    tool_schema: dict[str, Any] = SHELL_SCHEMA
    is_always_judged = True

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Run a command. An exit status other than 0 is part of the response."""
        command = str(parameters["command"])
        if "\0" in command:
            raise ToolError("the command holds a zero byte; leave it out")
        workspace = await _workspaces[trajectory_of(instance_id)].started()
        timeout_s = self.settings.command_timeout_s
        # Both outputs go to one pipe, so that their lines keep their order.
        script = f"exec 2>&1\n{command}"
        result = await workspace.exec([*self.settings.shell, script], timeout_s=timeout_s)
        text = _describe(result, timeout_s=timeout_s)
        return ToolResponse(text=text), None, {"exit_code": result.exit_code, "timed_out": result.timed_out}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        shared = _workspaces[trajectory_of(instance_id)]
        if shared.settings.check is None:
            return None
        return (await check_reward(await shared.started(), shared.settings.check)).reward


class EditFileTool(WorkspaceTool):
    """Tool that replaces a text in a file of the workspace, or writes a new file."""

    tool_schema: dict[str, Any] = EDIT_FILE_SCHEMA

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Edit the file."""
        path, old, new = (str(parameters[name]) for name in ("path", "old_text", "new_text"))
        if not path or "\0" in path or path.endswith("/"):
            raise ToolError(f"{path!r} is not the path of a file")
        workspace = await _workspaces[trajectory_of(instance_id)].started()
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "file"
            try:
                text = await _edited(workspace, path, old=old, new=new, copy=copy)
                copy.write_bytes(text.encode())
                await workspace.put(copy, path)
            except WorkspaceFileMissing as error:
                raise ToolError(f"there is no file {path!r}") from error
            except WorkspaceError as error:
                await workspace.exec(["true"])  # fails if the workspace has ended
                raise ToolError(str(error)) from error
        return ToolResponse(text=f"{path} was {'edited' if old else 'written'}"), None, {}


def workspace_tools(config: Mapping[str, Any]) -> list[BaseTool]:
    """Return both tools with the same config."""
    return [ShellTool(config), EditFileTool(config)]


async def _edited(workspace: Workspace, path: str, *, old: str, new: str, copy: Path) -> str:
    """Return the new text of a file."""
    if not old:
        return new
    await workspace.get(path, copy)
    text = _read(copy, name=path)
    if text.count(old) != 1:
        raise ToolError(f"old_text occurs {text.count(old)} times in {path!r}; it must occur exactly once")
    return text.replace(old, new)


def _read(file: Path, *, name: str) -> str:
    if not file.is_file() or file.stat().st_size > MAX_EDITED_BYTES:
        raise ToolError(f"{name!r} is not a file of at most {MAX_EDITED_BYTES} bytes")
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ToolError(f"{name!r} is not text in UTF-8") from error


def _describe(result: CommandResult, *, timeout_s: float) -> str:
    parts: list[str] = []
    if result.omitted_bytes:
        parts.append(f"[the first {result.omitted_bytes} bytes are left out]")
    parts.append((result.stdout + result.stderr).rstrip("\n"))
    if result.timed_out:
        parts.append(f"[the command exceeded the time limit of {timeout_s:g} s and was killed]")
    elif result.exit_code:
        parts.append(f"[exit status {result.exit_code}]")
    return "\n".join(part for part in parts if part) or NO_OUTPUT
