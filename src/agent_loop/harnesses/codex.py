"""Codex as a loop."""

from __future__ import annotations

import json

from agent_loop.harnesses.base import AgentCommand, AgentEnd, AgentRun, HarnessLoop, exit_error, json_lines
from agent_loop.loops.registry import register
from agent_loop.runtime.child_process import CommandResult

CONFIG = """\
model = {model}
model_provider = "gateway"
model_context_window = {context_length}
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.gateway]
name = "gateway"
base_url = {base_url}
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[analytics]
enabled = false

[feedback]
enabled = false

[history]
persistence = "none"
"""


@register("codex")
class CodexLoop(HarnessLoop):
    """Runs `codex exec`, which calls the Responses API."""

    program = "codex"
    install = "npm install -g @openai/codex"
    volatile = r"<current_date>[\d-]+|(?m:^(Chunk ID: \w+|Wall time: [\d.]+ seconds)$)"

    def command(self, run: AgentRun) -> AgentCommand:
        config = CONFIG.format(
            model=json.dumps(run.model),
            base_url=json.dumps(run.base_url),
            context_length=run.context_length,
        )
        return AgentCommand(
            ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-"],
            env={"CODEX_HOME": f"{run.home}/.codex", "OPENAI_API_KEY": run.api_key},
            files={".codex/config.toml": config},
            stdin=run.task,
        )

    def end(self, result: CommandResult) -> AgentEnd:
        events = json_lines(result.stdout)
        items = [event["item"] for event in events if event.get("type") == "item.completed"]
        answers = [item.get("text", "") for item in items if item.get("type") == "agent_message"]
        failures = [event["error"] for event in events if event.get("type") == "turn.failed"]
        if failures:
            return AgentEnd(error=str(failures[-1].get("message") or failures[-1]))
        return AgentEnd(answers[-1] if answers else "", error=exit_error(result))
