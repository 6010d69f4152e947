"""Runs tasks with a scripted model that solves them with the tool `shell`, or does nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent_loop.config import RolloutConfig
from agent_loop.environments.harbor import HarborTask, find_tasks, read_task
from agent_loop.errors import DataError
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_rows
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.trajectory import Trajectory
from tests.helpers import hermes_template, small_tokenizer, text_reply, tool_call_reply

Act = Callable[[HarborTask], str]
"""Returns the only command that the model runs for a task."""


def run_tasks(path: Path, *, workspace: Mapping[str, Any], command: Act | None) -> list[Trajectory]:
    """Run each task once, as `agent-loop eval` does, and return the trajectories.

    Args:
        path: The tasks.
        workspace: Settings of the workspaces.
        command: The command that the model runs. None: the model answers at once.
    """
    rows = load_rows([str(path)], prompt_key="prompt", workspace=workspace)
    tasks = {_letters(task.instruction): task for task in _usable_tasks(path)}
    config = RolloutConfig.model_validate(
        {
            "prompt_length": 2048,
            "response_length": 8192,
            "agent": {"default_agent_loop": "tool_agent"},
            "multi_turn": {"tools": ["shell"], "max_assistant_turns": 3},
        }
    )

    def script(request: ScriptedRequest) -> ScriptedReply:
        prompt = _letters(small_tokenizer().decode(request.prompt_ids.tolist()))
        task = next(task for instruction, task in tasks.items() if instruction in prompt)
        if command is None or request.turn:
            return text_reply("Done.")
        return tool_call_reply("shell", command=command(task))

    async def roll_out() -> list[Trajectory]:
        servers = [ScriptedServer(script)]
        async with AgentLoopManager(config, servers=servers, template=hermes_template()) as manager:
            return await manager.run(rows, n=1)

    return asyncio.run(roll_out())


def solve(task: HarborTask) -> str:
    """Return the text of a task's solution."""
    assert task.solution is not None
    return (task.solution / "solve.sh").read_text().removeprefix("#!/bin/sh\n")


def _usable_tasks(path: Path) -> Iterator[HarborTask]:
    for folder in find_tasks(path):
        with suppress(DataError):
            yield read_task(folder)


def _letters(text: str) -> str:
    """Return the letters of a text, by which a prompt is recognised however its white space is encoded."""
    return re.sub(r"[^a-zA-Z]", "", text)
