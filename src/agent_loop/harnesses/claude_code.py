"""Claude Code as a loop."""

from __future__ import annotations

from agent_loop.harnesses.base import (
    AgentCommand,
    AgentEnd,
    AgentRun,
    HarnessLoop,
    exit_error,
    last_json_object,
)
from agent_loop.loops.registry import register
from agent_loop.runtime.child_process import CommandResult

MIN_COMPACT_WINDOW = 100_000
"""Fewest tokens for which Claude Code accepts a length of the conversation."""


@register("claude-code")
class ClaudeCodeLoop(HarnessLoop):
    """Runs Claude Code in its print mode."""

    program = "claude"
    install = "npm install -g @anthropic-ai/claude-code"
    default_model = "claude-sonnet-4-5"
    volatile = r"Today's date is \d{4}-\d\d-\d\d"

    def command(self, run: AgentRun) -> AgentCommand:
        length = run.context_length
        window = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(length)} if length >= MIN_COMPACT_WINDOW else {}
        models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
        return AgentCommand(
            ["-p", "--output-format", "json", "--dangerously-skip-permissions"],
            env={
                "ANTHROPIC_BASE_URL": run.anthropic_base_url,
                "ANTHROPIC_API_KEY": run.api_key,
                **dict.fromkeys(models, run.model),
                **window,
                "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(run.max_turn_tokens),
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_TELEMETRY": "1",
                "DISABLE_ERROR_REPORTING": "1",
                "DISABLE_AUTOUPDATER": "1",
                "ENABLE_TOOL_SEARCH": "false",  # the gateway refuses deferred tools
                "IS_SANDBOX": "1",
            },
            stdin=run.task,
        )

    def end(self, result: CommandResult) -> AgentEnd:
        report = last_json_object(result.stdout)
        if report is None:
            return AgentEnd(error=exit_error(result) or "it reported no result")
        answer = str(report.get("result") or "")
        subtype = str(report.get("subtype"))
        if subtype == "error_max_turns":
            return AgentEnd(answer, gave_up=subtype)
        if report.get("is_error") or result.exit_code:
            return AgentEnd(error=answer or subtype)
        return AgentEnd(answer)
