"""The tool `gsm8k`: checks the model's answer against the row's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from agent_loop.answers import read_answer, with_mark
from agent_loop.errors import DataError
from agent_loop.runtime.boundary import OnReplay
from agent_loop.tools.base import BaseTool, ToolResponse

logger = logging.getLogger(__name__)

NOT_GIVEN = object()
NO_PROGRESS_PENALTY = -0.05
"""For an answer that is no better than the one before."""
DEFAULT_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calc_gsm8k_reward",
        "description": (
            "A tool for calculating the reward of gsm8k. (1.0 if parsed answer is correct, 0.0 if parsed answer is "
            "incorrect or not correctly parsed)"
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "answer": {
                    "type": "string",
                    "description": "The model's answer to the GSM8K math problem, must be a digits",
                }
            },
            "required": ["answer"],
        },
    },
}


@dataclass(slots=True)
class Attempt:
    """Where one trajectory stands."""

    ground_truth: Decimal | None
    """None if the row gives none: no answer is judged."""
    reward: float = 0.0
    """Of the last answer."""


class Gsm8kTool(BaseTool):
    """Tells the model whether its answer is right; 1 for a trajectory whose last answer was, else 0.

    A call earns 0 if its answer is better than the one before (at first: if it is right), and `NO_PROGRESS_PENALTY`
    otherwise. The row gives `create_kwargs: {ground_truth: "42"}`, or a whole GSM8K solution that ends in `#### 42`.
    Without a ground truth, the tool repeats each answer and has no rewards, which leaves them to the reward function.
    """

    tool_schema: dict[str, Any] = DEFAULT_SCHEMA
    on_replay = OnReplay.RERUN

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] = DEFAULT_SCHEMA) -> None:
        super().__init__(config, tool_schema)
        self._attempts: dict[str, Attempt] = {}
        self._has_warned = False

    async def create(self, instance_id: str, *, ground_truth: Any = NOT_GIVEN, **kwargs: Any) -> None:
        """Raises: DataError: The row gives a ground truth that is no number."""
        if ground_truth is NOT_GIVEN:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "tool %r is used without a ground truth and judges no answer; give rows "
                    "tools_kwargs[%r]['create_kwargs']['ground_truth'] if it should",
                    self.name,
                    self.name,
                )
            self._attempts[instance_id] = Attempt(None)
            return
        number = read_answer(with_mark(ground_truth))
        if number is None:
            raise DataError(
                f"tools_kwargs[{self.name!r}]: create_kwargs.ground_truth is {ground_truth!r}; give the right number"
            )
        self._attempts[instance_id] = Attempt(number)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Judges one answer."""
        attempt, answer = self._attempts[instance_id], parameters.get("answer", "")
        number = read_answer(with_mark(answer))
        if attempt.ground_truth is None:
            text = f"Current parsed answer={str(answer)!r} reward={attempt.reward}"
            return ToolResponse(text=text), None, {}
        before, attempt.reward = attempt.reward, float(number == attempt.ground_truth)
        text = f"Current parsed answer={str(answer)!r} reward={attempt.reward}"
        tool_reward = 0.0 if attempt.reward > before else NO_PROGRESS_PENALTY
        return ToolResponse(text=text), tool_reward, {"is_correct": bool(attempt.reward)}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """Return 1 if the last answer was right, else 0; None without a ground truth."""
        attempt = self._attempts[instance_id]
        return None if attempt.ground_truth is None else attempt.reward

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._attempts.pop(instance_id, None)
