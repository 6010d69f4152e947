"""Runs trajectories in containers until it has finished, or is killed.

Usage: `python -m tests.workspaces.chaos_driver FOLDER`. `FOLDER/indices` lists the trajectories. `FOLDER/results` gets
a line for each one that has ended. Even ones are agent programs that call the model through the gateway, odd ones are
tool loops with a shell.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_loop.rollout.jobs import Job
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.trajectory import Trajectory
from agent_loop.workspaces.tools import workspace_tools
from tests.helpers import hermes_template, text_reply, tool_call_reply, user
from tests.serve.harness import ProgramHarness

NUM_LANES = 5
IMAGE = "localhost/agent-loop-busybox"
PROGRAM = """
ask() {
    wget -q -O - --header "authorization: Bearer $OPENAI_API_KEY" --header "content-type: application/json" \\
        --post-data "{\\"model\\": \\"m\\", \\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$1\\"}]}" \\
        "$OPENAI_BASE_URL/chat/completions"
}
set -e
ask first > first.json
setsid sleep 600 &
sleep 0.5
ask second > second.json
"""
CHECK = {"command": ["sh", "-c", "test -s first.json -a -s second.json"]}


def row(index: int) -> dict[str, Any]:
    container = {"image": IMAGE, "pids": 64, "pool": 2 if index % 4 < 2 else 0}
    if index % 2:
        workspace = {"container": container, "check": {"command": ["test", "-s", "made"]}}
        return {"raw_prompt": user(f"task {index}"), "agent_name": "tool_agent", "workspace": workspace}
    workspace = {"container": container, "check": CHECK}
    return {"raw_prompt": user(f"task {index}"), "command": ["sh", "-c", PROGRAM], "workspace": workspace}


def script(request: ScriptedRequest) -> ScriptedReply:
    if "edit_file" not in hermes_template().decode(request.prompt_ids):
        return text_reply("An answer.")
    if request.turn == 0:
        return tool_call_reply("shell", command="sleep 0.5; date > made; setsid sleep 600 &")
    return text_reply("Done.")


async def run_lane(indices: Iterator[int], results: Path) -> None:
    harness = ProgramHarness(script)
    harness.worker._context.tools.update({tool.name: tool for tool in workspace_tools({})})
    for index in indices:
        trajectories = await harness.worker.run([Job(row(index), index, 0, {"temperature": 1.0})])
        with results.open("a") as file:
            file.write(json.dumps(_line(index, trajectories)) + "\n")


def _line(index: int, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    failures = [t.output.failure.error for t in trajectories if t.output.failure is not None]
    return {
        "index": index,
        "failure": failures[0] if failures else None,
        "reward": trajectories[0].reward,
        "num_tokens": sum(int(sum(t.output.response_mask)) for t in trajectories),
    }


async def main(folder: Path) -> None:
    indices = iter(json.loads((folder / "indices").read_text()))
    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_LANES):
            group.create_task(run_lane(indices, folder / "results"))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
