"""Judges the result of a trajectory by a command in its workspace."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from pathlib import Path
from typing import Any

from agent_loop.errors import RewardError, WorkspaceError, WorkspaceFileMissing
from agent_loop.rewards.function import Score, read_score
from agent_loop.runtime.describe import one_line
from agent_loop.workspaces.base import Workspace
from agent_loop.workspaces.settings import CheckSettings

COPY_TIMEOUT_S = 300.0
"""Seconds for copying files, in addition to the time limit of the command."""
MAX_OUTPUT = 2000
"""Characters that are kept from the end of the command's output."""
MAX_SHOWN = 300
"""Characters of the output that an error message has."""
KILLED = frozenset(sign for number in (signal.SIGKILL, signal.SIGTERM) for sign in (-number, 128 + number))
"""Exit statuses of a command that was killed, as Python and as a shell report it."""
MAX_REWARD_BYTES = 2**20


async def check_reward(workspace: Workspace, check: CheckSettings) -> Score:
    """Put the files of the check into the workspace, run its command, and return the reward.

    Only what the check says is a reward. A check that is killed, exceeds its time limit or writes no reward says
    nothing about the agent, and is an error like a workspace that fails.

    Returns:
        The reward, with `check_exit_code` and the end of the command's output as `check_output`.

    Raises:
        WorkspaceError: The workspace has ended, a file is missing, or the command cannot be started, was killed,
            exceeded its time limit, or wrote no reward.
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
    output = f"{result.stdout}{result.stderr}"[-MAX_OUTPUT:]
    if result.timed_out:
        raise _without_reward(f"exceeded its time limit of {check.timeout_s:g} s", output)
    if result.exit_code in KILLED:
        raise _without_reward(f"was killed (exit status {result.exit_code})", output)
    score = Score(float(result.exit_code == 0))
    if check.reward_file:
        try:
            score = await _read_reward(workspace, check.reward_file)
        except WorkspaceFileMissing:
            raise _without_reward(f"wrote no {check.reward_file}", output) from None
        except (RewardError, ValueError) as error:
            raise _without_reward(f"wrote no reward into {check.reward_file}: {error}", output) from error
    return Score(score.reward, {**score.extra, "check_exit_code": result.exit_code, "check_output": output})


async def _read_reward(workspace: Workspace, source: str) -> Score:
    """Read a number, or an object with a reward, from a file."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "reward"
        await workspace.get(source, target)
        if not target.is_file() or target.stat().st_size > MAX_REWARD_BYTES:
            raise ValueError("it is not a small file")
        value: Any = json.loads(target.read_text())
    return read_score(value, source=source)


def _without_reward(problem: str, output: str) -> WorkspaceError:
    shown = one_line(output[-MAX_SHOWN:], max_length=MAX_SHOWN)
    return WorkspaceError(f"the check {problem}" + (f"; its output ends with: {shown}" if shown else ""))
