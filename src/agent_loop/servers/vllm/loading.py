"""What the workers' answers to new weights mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.errors import WeightsError


def mixed_weights(answers: Sequence[Mapping[str, Any]]) -> str:
    """Why the engine holds a mix of old and new weights; empty if every worker holds the new ones.

    Args:
        answers: Of `WeightWorker.agent_loop_load_weights`, one per worker.

    Raises:
        WeightsError: They were refused, and every worker holds the old ones.
    """
    errors = [answer for answer in answers if "error" in answer]
    if not errors:
        return ""
    if len(errors) == len(answers) and all(error["is_unchanged"] for error in errors):
        raise WeightsError(errors[0]["error"])
    return (
        f"loading new weights failed half-way ({errors[0]['error']}), so that the engine holds a mix of old and new "
        "ones; publish again, or start another server"
    )
