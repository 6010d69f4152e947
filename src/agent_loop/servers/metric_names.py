"""Names and help texts of the Prometheus metrics that both a rollout and `agent-loop serve` export."""

from __future__ import annotations

PROMPT_TOKENS = ("agent_loop_prompt_tokens", "Tokens of prompts.")
COMPLETION_TOKENS = ("agent_loop_completion_tokens", "Tokens sampled.")
RUNNING = ("agent_loop_running", "Completions in the engine's batch.")
WAITING = ("agent_loop_waiting", "Completions in the engine's queue.")
ALIVE = ("agent_loop_server_alive", "1 if the server is healthy.")
