"""A trajectory as a line of JSON, as a reader of the file sees it."""

from __future__ import annotations

import json
from typing import Any

from agent_loop.storage.columns import StepFacts, columns_of
from agent_loop.storage.json_lines import to_line
from agent_loop.trajectory import Trajectory


def as_line(trajectory: Trajectory) -> dict[str, Any]:
    """Return the values of a trajectory's line."""
    facts = StepFacts(0, "rollout", weight_version=None, success_threshold=1.0)
    return json.loads(to_line(columns_of(trajectory, facts=facts)))
