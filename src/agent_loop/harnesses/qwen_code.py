"""Qwen Code as a loop."""

from __future__ import annotations

import json

from agent_loop.harnesses.base import AgentCommand, AgentEnd, AgentRun, HarnessLoop, exit_error
from agent_loop.loops.registry import register
from agent_loop.runtime.child_process import CommandResult

TOO_MANY_TURNS = 53
"""Exit status at the agent's own limit of turns."""


@register("qwen-code")
class QwenCodeLoop(HarnessLoop):
    """Runs Qwen Code with a task on its standard input."""

    program = "qwen"
    install = "npm install -g @qwen-code/qwen-code"
    volatile = r"(Today's date is|The current date is:) \w+, \w+ \d+, \d{4}|(?m:^Process Group PGID: \d+$)"

    def command(self, run: AgentRun) -> AgentCommand:
        settings = {
            "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "model": {"generationConfig": {"contextWindowSize": run.context_length}},
        }
        return AgentCommand(
            ["--yolo", "--auth-type", "openai", "--chat-recording", "false"],
            env={
                "OPENAI_BASE_URL": run.base_url,
                "OPENAI_API_KEY": run.api_key,
                "OPENAI_MODEL": run.model,
                "QWEN_TELEMETRY_ENABLED": "false",
            },
            files={".qwen/settings.json": json.dumps(settings)},
            stdin=run.task,
        )

    def end(self, result: CommandResult) -> AgentEnd:
        if result.exit_code == TOO_MANY_TURNS:
            return AgentEnd(gave_up=exit_error(result))
        return AgentEnd(result.stdout.strip(), error=exit_error(result))
