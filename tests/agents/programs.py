"""The agents under test: their loops, their shell tools, and policies for scripted servers that use these tools."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from tests.helpers import small_tokenizer, text_reply, tool_call_reply

TASK = "Create a file named greeting.txt that contains hello."
COMMAND = "echo hello > greeting.txt"
TITLE = "A short title"
DONE = "The file is written."


def programs_folder() -> Path:
    """Return the folder of the installed programs; see `install_agents.sh`."""
    return Path(os.environ.get("AGENT_LOOP_TEST_AGENTS", sys.prefix)) / "programs"


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent under test."""

    loop: str
    """Name of its loop."""
    tool: str
    """Name of its shell tool."""
    arguments: Callable[[str], Mapping[str, Any]]
    """Returns the arguments of the tool that run a command."""
    finish: ScriptedReply = field(default_factory=lambda: text_reply(DONE))
    """Completion with which the agent ends."""
    answer: str = DONE
    """What the agent reports."""

    def call(self, command: str) -> ScriptedReply:
        """Return a completion that runs a command in the agent's shell."""
        return tool_call_reply(self.tool, **self.arguments(command))


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
AGENTS = {
    agent.loop: agent
    for agent in (
        Agent("claude-code", "Bash", lambda command: {"command": command, "description": "Write"}),
        Agent("codex", "exec_command", lambda command: {"cmd": command, "yield_time_ms": 30_000}),
        Agent("opencode", "bash", lambda command: {"command": command, "description": "Write"}),
        Agent("qwen-code", "run_shell_command", lambda command: {"command": command, "is_background": False}),
        Agent(
            "mini-swe-agent",
            "bash",
            lambda command: {"command": command},
            finish=tool_call_reply("bash", command=SUBMIT),
            answer="",
        ),
    )
}


def policy(agent: Agent, *commands: str) -> Callable[[ScriptedRequest], ScriptedReply]:
    """Return a script that runs the commands one after the other, and then ends.

    A conversation without tools, such as one that asks for a title, gets `TITLE`.
    """

    def reply(request: ScriptedRequest) -> ScriptedReply:
        ids = request.prompt_ids.tolist()
        if "# Tools\n<tools>" not in small_tokenizer().decode(ids):
            return text_reply(TITLE)
        num_results = ids.count(small_tokenizer().convert_tokens_to_ids("<tool_response>"))
        return agent.call(commands[num_results]) if num_results < len(commands) else agent.finish

    return reply
