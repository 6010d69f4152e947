"""Small tasks in Harbor's form, a scripted model that solves them, and a provider without a container runtime."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent_loop.config import RolloutConfig
from agent_loop.environments.harbor import HarborTask, find_tasks, read_task
from agent_loop.errors import DataError
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_rows
from agent_loop.runtime.child_process import CommandResult
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.scripted import Script, ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row
from agent_loop.workspaces.base import NO_VARIABLES, Workspace, WorkspaceProvider
from agent_loop.workspaces.folder import FolderWorkspace
from tests.helpers import hermes_template, small_tokenizer, text_reply, tool_call_reply

Act = Callable[[HarborTask], str]
"""Returns the only command that the model runs for a task."""

_ABSOLUTE = re.compile(r"(?<![\w.])/(?=(logs|tests|solution)\b)")


def write_task(folder: Path, *, task_toml: str = "", instruction: str = "Write 42 to answer.txt.") -> Path:
    """Write a valid task and return its folder."""
    files = {
        "task.toml": task_toml,
        "instruction.md": instruction,
        "environment/Dockerfile": "FROM scratch\n",
        "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/sh\necho 42 > answer.txt\n",
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


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

    return roll_out(rows, script, config=config)


def roll_out(rows: list[Row], script: Script, *, config: RolloutConfig) -> list[Trajectory]:
    async def main() -> list[Trajectory]:
        servers = [ScriptedServer(script)]
        async with AgentLoopManager(config, servers=servers, template=hermes_template()) as manager:
            return await manager.run(rows, n=1)

    return asyncio.run(main())


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


class RelocatedWorkspace(FolderWorkspace):
    """Folder in which the absolute paths of tasks are below the working folder, also in the text of scripts."""

    async def exec(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] = NO_VARIABLES,
        folder: str | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> CommandResult:
        moved = [self._moved(part) for part in command]
        return await super().exec(moved, env=env, folder=folder, stdin=stdin, timeout_s=timeout_s)

    async def put(self, source: Path, target: str) -> None:
        await super().put(source, self._moved(target))
        await run_in_thread(self._move_scripts, Path(self._moved(target)))

    async def get(self, source: str, target: Path) -> None:
        await super().get(self._moved(source), target)

    def _move_scripts(self, folder: Path) -> None:
        for path in folder.rglob("*.sh"):
            path.write_text(self._moved(path.read_text()))

    def _moved(self, text: str) -> str:
        return _ABSOLUTE.sub(f"{self.folder}/", text)


class Relocated(WorkspaceProvider):
    """Provider of such folders, which are empty.

    Args:
        container: The settings of the task's container.
    """

    def __init__(self, container: Mapping[str, Any]) -> None:
        assert container["dockerfile"]

    async def start(self, name: str) -> Workspace:
        return RelocatedWorkspace(name)


RELOCATED = f"{__name__}:Relocated"
