"""The record of a trajectory: segments, and everything that is derived from them."""

from agent_loop.trajectory.branches import (
    branch_weights,
    group_branches,
    mean_over_rollouts,
    mean_reward,
    without_lost,
)
from agent_loop.trajectory.incidents import (
    Failure,
    FailureKind,
    Feedback,
    Incident,
    IncidentKind,
    Span,
    Trace,
)
from agent_loop.trajectory.output import AgentLoopMetrics, AgentLoopOutput, Trajectory, rewards_of
from agent_loop.trajectory.segments import UNKNOWN_VERSION, Segment, count_turns, placed_attachments

__all__ = [
    "UNKNOWN_VERSION",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "Failure",
    "FailureKind",
    "Feedback",
    "Incident",
    "IncidentKind",
    "Segment",
    "Span",
    "Trace",
    "Trajectory",
    "branch_weights",
    "count_turns",
    "group_branches",
    "mean_over_rollouts",
    "mean_reward",
    "placed_attachments",
    "rewards_of",
    "without_lost",
]
