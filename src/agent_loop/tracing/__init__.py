"""Finished trajectories told to others: events, spans of users' code, and writers that cannot hold a rollout up."""

from agent_loop.tracing.user_spans import rollout_trace_attr, rollout_trace_op

__all__ = ["rollout_trace_attr", "rollout_trace_op"]
