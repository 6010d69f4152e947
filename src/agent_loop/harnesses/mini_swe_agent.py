"""mini-swe-agent as a loop."""

from __future__ import annotations

import json

from agent_loop.harnesses.base import AgentCommand, AgentRun, HarnessLoop
from agent_loop.loops.registry import register

MAX_ATTEMPTS = 2
"""Attempts at a request. The agent also repeats requests that the gateway refuses at a limit of the trajectory."""


@register("mini-swe-agent")
class MiniSweAgentLoop(HarnessLoop):
    """Runs `mini` with its own prompts and its tool `bash`."""

    program = "mini"
    install = "pip install mini-swe-agent"

    def command(self, run: AgentRun) -> AgentCommand:
        model = {
            "model_name": f"openai/{run.model}",
            "model_kwargs": {"api_base": run.base_url},
            "cost_tracking": "ignore_errors",
        }
        config = {"run": {"task": run.task}, "model": model, "agent": {"cost_limit": 0}}
        path = f"{run.home}/agent-loop.yaml"
        return AgentCommand(
            ["-y", "--exit-immediately", "-c", "mini.yaml", "-c", path, "-o", f"{run.home}/trajectory.json"],
            env={
                "OPENAI_API_KEY": run.api_key,
                "MSWEA_CONFIGURED": "true",
                "MSWEA_SILENT_STARTUP": "1",
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(MAX_ATTEMPTS),
                "MSWEA_GLOBAL_CONFIG_DIR": f"{run.home}/.mini-swe-agent",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
            files={"agent-loop.yaml": json.dumps(config)},
        )
