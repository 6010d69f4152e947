"""Results of a weight update in vLLM's workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.errors import WeightsError


def mixed_weights(results: Sequence[Mapping[str, Any]]) -> str:
    """Return why the engine has a mix of old and new weights; empty if every worker has the new weights.

    Args:
        results: Results of `WeightWorker.agent_loop_load_weights`, one per worker.

    Raises:
        WeightsError: The weights were refused, and every worker has the old weights.
    """
    errors = [result for result in results if "error" in result]
    if not errors:
        return ""
    if len(errors) == len(results) and all(error["is_unchanged"] for error in errors):
        raise WeightsError(errors[0]["error"])
    return (
        f"loading new weights failed half-way ({errors[0]['error']}), so the engine has a mix of old and new "
        "weights; publish again, or start another server"
    )
