"""Tells the model whether its answer to a GSM8K question is right, and lets it try again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_loop.answers import read_answer, with_mark
from agent_loop.config import Positive, Section
from agent_loop.errors import DataError
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.flipping import text_of
from agent_loop.interactions.settings import read_settings
from agent_loop.runtime.boundary import OnReplay
from agent_loop.types import Message


class Gsm8kSettings(Section):
    """`config` of the interaction."""

    right_reply: str = "Your response is correct!"
    wrong_reply: str = "Your response is incorrect! You need to reflect on your answer and try again."
    max_attempts: Positive | None = None
    """So many answers at most; None leaves it to the limits of the rollout."""
    judges: bool = True
    """The last answer's score is the verdict on the trajectory; off where a tool or a reward function judges it."""


class Gsm8kInteraction(BaseInteraction):
    """Scores each answer 1 or 0 and ends with the first right one.

    The row's `interaction_kwargs` hold `ground_truth`: a number, or a whole GSM8K solution that ends in `#### 42`. The
    answer is the number after the last `####`; without that mark, the number that the reply begins with.
    """

    on_replay: OnReplay | str = OnReplay.RERUN

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._settings = read_settings(Gsm8kSettings, self.config)
        self._scores: dict[str, list[float]] = {}

    async def start_interaction(
        self, instance_id: str, *, ground_truth: str | float | None = None, **kwargs: Any
    ) -> None:
        """Raises: DataError: The row gives no number as its ground truth."""
        if read_answer(with_mark(ground_truth)) is None:
            raise DataError(
                f"interaction_kwargs.ground_truth is {ground_truth!r}; give the right number, as in '42'"
            )
        self._scores[instance_id] = []

    async def generate_response(
        self, instance_id: str, messages: list[Message], *, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        scores = self._scores[instance_id]
        answer = read_answer(with_mark(_last_words(messages)))
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


def _last_words(messages: list[Message]) -> str:
    for message in reversed(messages):
        if message["role"] == "assistant":
            return text_of(message)
    return ""
