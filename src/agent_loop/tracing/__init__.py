"""Traces of finished trajectories: events, spans of user code, and writers that never block a rollout."""

from agent_loop.tracing.user_spans import rollout_trace_attr, rollout_trace_op

__all__ = ["rollout_trace_attr", "rollout_trace_op"]
