"""Data of a trajectory for verl besides its tokens: the row as verl's loops get it, and fields of its completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from agent_loop.trajectory import Trajectory

RECORD = "__verl_record__"
"""Column of a row with its `VerlRecord`."""
GREEDY: Mapping[str, Any] = {"temperature": 0, "top_p": 1.0, "top_k": -1}
"""Sampling parameters of verl for rows that ask for the likeliest tokens."""
SPECULATION_COUNTERS = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
"""Fields of completions that verl adds up over the turns."""


class VerlRecord:
    """Record of one trajectory.

    Args:
        row: The columns that verl passes to a loop.
        agent_name: Name of the loop in verl's registry.
        is_greedy: Whether the row asks for the likeliest tokens.
    """

    def __init__(self, row: Mapping[str, Any], *, agent_name: str, is_greedy: bool) -> None:
        self.row = row
        self.agent_name = agent_name
        self.is_greedy = is_greedy
        self.trajectories: list[Trajectory] = []
        """The finished trajectory, or its branches."""
        self.outputs: Sequence[Any] = ()
        """The same in verl's form, scored."""
        self.place: tuple[int, int] = (0, 0)
        """Group and rollout within the step."""
        self.begin()

    def begin(self) -> None:
        """Forget what an earlier attempt recorded."""
        self.extra_fields: dict[str, Any] = {}
        """Fields of the completions, merged as verl's tool loop does."""
        self.num_preempted: int | None = None
        self.routed_experts: Any = None
        self.loop_outputs: Sequence[Any] = ()
        """Return value of a loop in verl's form."""
        self.agent_data: Any = None
        """State of the tool loop, which verl passes to tools."""

    def add_completion(self, output: Any) -> None:
        """Add the fields of a completion, given as verl's `TokenOutput`."""
        if output.num_preempted is not None:
            self.num_preempted = (self.num_preempted or 0) + output.num_preempted
        if output.routed_experts is not None:
            self.routed_experts = output.routed_experts
        fields = output.extra_fields
        if not self.extra_fields:
            self.extra_fields.update(fields)
            return
        if fields.get("max_global_steps"):
            self.extra_fields["max_global_steps"] = fields["max_global_steps"]
        for name in SPECULATION_COUNTERS:
            if name in fields and name in self.extra_fields:
                self.extra_fields[name] = int(self.extra_fields[name]) + int(fields[name])

    @property
    def priority(self) -> int:
        return int(self.row.get("priority", 0))

    @property
    def is_failed(self) -> bool:
        """Whether the trajectory, or any of its branches, failed."""
        return any(trajectory.output.failure is not None for trajectory in self.trajectories)


current_record: ContextVar[VerlRecord | None] = ContextVar("current_record", default=None)
"""Record of the trajectory whose loop is running. None in loops that this package does not ship."""
