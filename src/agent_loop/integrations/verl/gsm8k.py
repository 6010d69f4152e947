"""Tool and interaction for GSM8K, as in verl's examples: both compare the model's answer with the row's.

An answer is the number after `####`, which is how the solutions of GSM8K end.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from agent_loop.config import Positive, Section
from agent_loop.errors import DataError
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.registry import read_settings
from agent_loop.interactions.simulated_user import text_of
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.types import Message

logger = logging.getLogger(__name__)

MARK = "####"
_ANSWER = re.compile(MARK + r"\s*\$?(-?\$?[\d.,]+)")


def with_mark(answer: Any) -> str:
    """Return an answer as text, with `#### ` in front unless it already has the mark."""
    text = str(answer).strip()
    return text if MARK in text else f"{MARK} {text}"


def read_answer(text: str) -> Decimal | None:
    """Return the number after the last `####` without commas and dollar signs, or None if there is none."""
    found = _ANSWER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", "").replace("$", "").rstrip("."))
    except InvalidOperation:
        return None


NOT_GIVEN = object()
NO_PROGRESS_PENALTY = -0.05
"""Reward of a call whose answer is not better than the previous one."""
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
class Gsm8kState:
    """State of the tool for one trajectory."""

    ground_truth: Decimal | None
    """None if the row has no ground truth, in which case no answer is scored."""
    reward: float = 0.0
    """Score of the last answer."""


class Gsm8kTool(BaseTool):
    """Tool that checks an answer. The trajectory's reward is 1 if its last answer was right, else 0.

    The reward of a call is 0 if its answer is better than the previous one (for the first call: if it is right), and
    `NO_PROGRESS_PENALTY` otherwise. The row's `create_kwargs` hold `ground_truth`: a number such as `"42"`, or a whole
    GSM8K solution that ends in `#### 42`. Without a ground truth, the tool repeats each answer and returns no rewards,
    so that the reward function decides.
    """

    tool_schema: dict[str, Any] = DEFAULT_SCHEMA
    on_replay = OnReplay.RERUN

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] = DEFAULT_SCHEMA) -> None:
        super().__init__(config, tool_schema)
        self._states: dict[str, Gsm8kState] = {}
        self._has_warned = False

    async def create(self, instance_id: str, *, ground_truth: Any = NOT_GIVEN, **kwargs: Any) -> None:
        """Store the ground truth of the row."""
        if ground_truth is NOT_GIVEN:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "tool %r is used without a ground truth, so it scores no answer; to have answers scored, set "
                    "tools_kwargs[%r]['create_kwargs']['ground_truth'] in the rows",
                    self.name,
                    self.name,
                )
            self._states[instance_id] = Gsm8kState(None)
            return
        number = read_answer(with_mark(ground_truth))
        if number is None:
            raise DataError(
                f"tools_kwargs[{self.name!r}]: create_kwargs.ground_truth is {ground_truth!r}; give the right number"
            )
        self._states[instance_id] = Gsm8kState(number)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Score one answer."""
        state, answer = self._states[instance_id], parameters.get("answer", "")
        number = read_answer(with_mark(answer))
        if state.ground_truth is None:
            text = f"Current parsed answer={str(answer)!r} reward={state.reward}"
            return ToolResponse(text=text), None, {}
        previous, state.reward = state.reward, float(number == state.ground_truth)
        text = f"Current parsed answer={str(answer)!r} reward={state.reward}"
        tool_reward = 0.0 if state.reward > previous else NO_PROGRESS_PENALTY
        return ToolResponse(text=text), tool_reward, {"is_correct": bool(state.reward)}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """Return 1 if the last answer was right, else 0; None without a ground truth."""
        state = self._states[instance_id]
        return None if state.ground_truth is None else state.reward

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._states.pop(instance_id, None)


class Gsm8kSettings(Section):
    """`config` of the interaction."""

    right_reply: str = "Your response is correct!"
    wrong_reply: str = "Your response is incorrect! You need to reflect on your answer and try again."
    max_attempts: Positive | None = None
    """Maximum number of answers; None leaves it to the limits of the rollout."""
    judges: bool = True
    """Whether the last answer's score is the reward of the trajectory. Turn it off where a tool or a reward function
    scores the answer."""


class Gsm8kInteraction(BaseInteraction):
    """Interaction that scores each answer 1 or 0, asks the model to try again, and ends with the first right answer.

    The row's `interaction_kwargs` hold `ground_truth`: a number, or a whole GSM8K solution that ends in `#### 42`. The
    answer is the number after the last `####`. Without that mark, it is the number that the completion begins with.
    """

    on_replay: OnReplay | str = OnReplay.RERUN

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._settings = read_settings(Gsm8kSettings, self.config)
        self._scores: dict[str, list[float]] = {}

    async def start_interaction(
        self, instance_id: str, *, ground_truth: str | float | None = None, **kwargs: Any
    ) -> None:
        """Check the ground truth of the row."""
        if read_answer(with_mark(ground_truth)) is None:
            raise DataError(
                f"interaction_kwargs.ground_truth is {ground_truth!r}; give the right number, as in '42'"
            )
        self._scores[instance_id] = []

    async def generate_response(
        self, instance_id: str, messages: list[Message], *, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        scores = self._scores[instance_id]
        answer = read_answer(with_mark(_last_completion(messages)))
        is_right = answer == read_answer(with_mark(ground_truth))
        scores.append(float(is_right))
        is_over = is_right or len(scores) == self._settings.max_attempts
        reply = self._settings.right_reply if is_right else self._settings.wrong_reply
        return is_over, reply, scores[-1], {"answer": None if answer is None else str(answer)}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        if not self._settings.judges:
            return None
        return (self._scores[instance_id] or [0.0])[-1]

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._scores.pop(instance_id, None)


def _last_completion(messages: list[Message]) -> str:
    for message in reversed(messages):
        if message["role"] == "assistant":
            return text_of(message)
    return ""
