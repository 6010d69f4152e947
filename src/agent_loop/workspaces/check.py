"""Judges the result of a trajectory by a command in its workspace."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from agent_loop.errors import RewardError, WorkspaceError, WorkspaceFileMissing
from agent_loop.rewards.function import Score, read_score
from agent_loop.runtime.child_process import CommandResult
from agent_loop.workspaces.base import Workspace
from agent_loop.workspaces.settings import CheckSettings

COPY_TIMEOUT_S = 300.0
"""Seconds for copying files, in addition to the time limit of the command."""
MAX_OUTPUT = 2000
"""Characters that are kept from the end of the command's output."""
MAX_REWARD_BYTES = 2**20


async def check_reward(workspace: Workspace, check: CheckSettings) -> Score:
    """Put the files of the check into the workspace, run its command, and return the reward.

    A check that fails, exceeds its time limit or writes no valid reward scores 0.0. A workspace that fails is an error,
    not a reward.

    Returns:
        The reward, with `check_exit_code` and the end of the command's output as `check_output`.

    Raises:
        WorkspaceError: The workspace has ended, a file is missing, or the command cannot be started.
    """
    try:
        async with asyncio.timeout(check.timeout_s + COPY_TIMEOUT_S):
            return await _check(workspace, check)
    except TimeoutError as error:
        raise WorkspaceError("the workspace did not respond in time while it was checked") from error


async def _check(workspace: Workspace, check: CheckSettings) -> Score:
    if check.files:
        await workspace.put(Path(check.files), check.files_to or workspace.folder)
    if check.reward_file:
        # The agent may have written the file.
        await workspace.exec(["rm", "-rf", "--", check.reward_file], timeout_s=COPY_TIMEOUT_S)
    result = await workspace.exec(
        check.command, env=check.env, folder=check.folder or None, timeout_s=check.timeout_s
    )
    if result.timed_out:
        return _score(0.0, result, note=f"the check exceeded its time limit of {check.timeout_s:g} s")
    if not check.reward_file:
        return _score(float(result.exit_code == 0), result)
    try:
        score = await _read_reward(workspace, check.reward_file)
    except WorkspaceFileMissing:
        return _score(0.0, result, note=f"the check wrote no {check.reward_file}")
    except (RewardError, ValueError) as error:
        return _score(0.0, result, note=f"{check.reward_file} holds no reward: {error}")
    return _score(score.reward, result, extra=score.extra)


async def _read_reward(workspace: Workspace, source: str) -> Score:
    """Read a number, or an object with a reward, from a file.

    Raises:
        ValueError: The file is not JSON, or too large.
        RewardError: The value is not a reward.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "reward"
        await workspace.get(source, target)
        if not target.is_file() or target.stat().st_size > MAX_REWARD_BYTES:
            raise ValueError("it is not a small file")
        value: Any = json.loads(target.read_text())
    return read_score(value, source=source)


def _score(reward: float, result: CommandResult, *, extra: Any = None, note: str = "") -> Score:
    output = f"{result.stdout}{result.stderr}"[-MAX_OUTPUT:]
    if note:
        output = f"{output.rstrip()}\n[{note}]".lstrip()
    return Score(reward, {**(extra or {}), "check_exit_code": result.exit_code, "check_output": output})
