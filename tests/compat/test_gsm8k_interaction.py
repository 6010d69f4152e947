from __future__ import annotations

from decimal import Decimal

import pytest

from agent_loop.integrations.verl.gsm8k import Gsm8kInteraction, read_answer, with_mark
from agent_loop.types import StopReason
from tests.helpers import roles
from tests.interactions.conversations import converse


def tutor(**config: object) -> Gsm8kInteraction:
    return Gsm8kInteraction({"name": "gsm8k", **config})


def test_a_wrong_answer_may_be_corrected() -> None:
    trajectory = converse(tutor(), ["#### 41", "Let me see. #### 42"], ground_truth="42", query="6 * 7?")
    output = trajectory.output
    assert output.turn_scores == (0.0, 1.0)
    assert [feedback.extra for feedback in output.feedback] == [{"answer": "41"}, {"answer": "42"}]
    assert output.stop_reason is StopReason.INTERACTION_FINISHED
    assert roles(output.messages) == ["user", "assistant", "user", "assistant", "user"]
    assert "incorrect" in output.messages[2]["content"]
    assert output.messages[-1]["content"] == "Your response is correct!"
    assert trajectory.reward == 1.0


def test_the_interaction_ends_after_the_last_attempt_and_scores_the_last_answer() -> None:
    trajectory = converse(tutor(max_attempts=2), ["#### 1", "I do not know."], ground_truth="42")
    assert trajectory.output.stop_reason is StopReason.INTERACTION_FINISHED
    assert trajectory.reward == 0.0


def test_an_interaction_with_judges_off_gives_no_reward() -> None:
    trajectory = converse(tutor(judges=False), ["#### 42"], ground_truth="42")
    assert trajectory.output.turn_scores == (1.0,)
    assert trajectory.reward is None


def test_a_row_without_ground_truth_fails_with_the_reason() -> None:
    failure = converse(tutor(), ["#### 42"]).output.failure
    assert failure is not None
    assert "interaction_kwargs.ground_truth is None; give the right number" in failure.error


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So it is 3 + 4.\n#### 7", "7"),
        ("#### 5\nNo, wait.\n#### $1,234.50", "1234.5"),
        ("#### -3 apples", "-3"),
        ("####42.", "42"),
        ("#### unknown", None),
        ("42.00 apples", "42"),
        ("It is 42.", None),
        ("#### ..", None),
        ("", None),
    ],
)
def test_the_answer_is_the_number_after_the_last_mark(text: str, answer: str | None) -> None:
    assert read_answer(with_mark(text)) == (None if answer is None else Decimal(answer))
