"""OpenCode as a loop."""

from __future__ import annotations

import json

from agent_loop.harnesses.base import AgentCommand, AgentEnd, AgentRun, HarnessLoop, exit_error, json_lines
from agent_loop.loops.registry import register
from agent_loop.runtime.child_process import CommandResult

OFF = (
    "OPENCODE_DISABLE_AUTOUPDATE",
    "OPENCODE_DISABLE_LSP_DOWNLOAD",
    "OPENCODE_DISABLE_MODELS_FETCH",
    "OPENCODE_DISABLE_SHARE",
)


@register("opencode")
class OpenCodeLoop(HarnessLoop):
    """Runs `opencode run`."""

    program = "opencode"
    install = "npm install -g opencode-ai"
    volatile = r"Today's date: \w{3} \w{3} \d\d \d{4}"

    def command(self, run: AgentRun) -> AgentCommand:
        limit = {"context": run.context_length, "output": run.max_turn_tokens}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "gateway",
            "options": {"baseURL": run.base_url, "apiKey": run.api_key},
            "models": {run.model: {"name": run.model, "limit": limit, "tool_call": True}},
        }
        settings = {
            "model": f"gateway/{run.model}",
            "small_model": f"gateway/{run.model}",
            "provider": {"gateway": provider},
            "enabled_providers": ["gateway"],
            "permission": "allow",
            "share": "disabled",
            "autoupdate": False,
        }
        return AgentCommand(
            ["run", "--format", "json"],
            env={"OPENCODE_CONFIG_CONTENT": json.dumps(settings), **dict.fromkeys(OFF, "1")},
            stdin=run.task,
        )

    def end(self, result: CommandResult) -> AgentEnd:
        events = json_lines(result.stdout)
        errors = [event["error"] for event in events if event.get("type") == "error"]
        answers = [event["part"].get("text", "") for event in events if event.get("type") == "text"]
        if errors:
            return AgentEnd(error=json.dumps(errors[-1]))
        return AgentEnd(answers[-1] if answers else "", error=exit_error(result))
