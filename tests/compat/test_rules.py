"""Rules of verl's data sources, reward functions with verl's parameters, and the interaction of GSM8K."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import ConfigError, RewardError
from agent_loop.integrations.verl.gsm8k import Gsm8kInteraction, read_answer, with_mark
from agent_loop.integrations.verl.rules import default_compute_score, gsm8k_flexible
from agent_loop.rewards.function import load_batch_reward, load_reward
from agent_loop.rewards.rules import boxed, is_equal
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import StopReason
from tests.compat.harness import RULES
from tests.helpers import roles
from tests.interactions.conversations import converse

QUESTION = {"role": "user", "content": "Put the answer after ####, such as #### 7. What is 6 * 7?"}
CALL = {"id": "1", "type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}


def output(*messages: dict[str, Any]) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=[1],
        response_ids=[2, 3],
        response_mask=[1, 1],
        messages=[QUESTION, *messages],
        num_turns=1 + len(messages),
    )


def answering(text: str) -> AgentLoopOutput:
    return output({"role": "assistant", "content": text})


def row(source: str = "openai/gsm8k", truth: Any = "42", **extra: Any) -> dict[str, Any]:
    return {
        "data_source": source,
        "raw_prompt": [QUESTION],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra,
    }


@pytest.mark.parametrize(
    ("source", "text", "truth", "score"),
    [
        ("openai/gsm8k", "6 * 7 is 42.\n#### 42", "42", 1.0),
        ("openai/gsm8k", "#### 1,234.00", "1234", 1.0),
        ("openai/gsm8k", "#### $42", "42", 1.0),
        ("openai/gsm8k", "#### 41\nNo: #### 42", "42", 1.0),
        ("openai/gsm8k", "It is 42.", "42", 0.0),
        ("openai/gsm8k", "#### 41", "42", 0.0),
        ("lighteval/MATH", r"So \boxed{\frac{1}{2}}", r"\dfrac12", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        ("HuggingFaceH4/MATH-500", r"\boxed{(1, \infty)}", r"\left(1,\infty\right)", 1.0),
        ("HuggingFaceH4/MATH-500", r"\boxed{3} or 4", "4", 0.0),
        ("HuggingFaceH4/MATH-500", "4", "4", 0.0),
        ("numina_olympiads", r"\boxed{10\%}", "10", 1.0),
        ("hiyouga/geometry3k", r"<think>A square.</think> \boxed{4}", "4", 1.0),
        ("hiyouga/geometry3k", r"\boxed{4}", "4", 0.9),
        ("searchR1_nq", "<answer>The Nile.</answer>", {"target": ["Nile", "River Nile"]}, 1.0),
        ("searchR1_hotpotqa", "<answer>Amazon</answer>", {"target": ["Nile"]}, 0.0),
        ("searchR1_triviaqa", "Nile", {"target": ["Nile"]}, 0.0),
    ],
)
def test_a_solution_is_scored_by_the_rule_of_its_data_source(
    source: str, text: str, truth: Any, score: float
) -> None:
    assert default_compute_score(source, text, truth) == pytest.approx(score)


@pytest.mark.parametrize("source", ["math_dapo", "aime2024"])
def test_a_wrong_answer_has_a_penalty_in_the_rule_of_dapo(source: str) -> None:
    right = default_compute_score(source, "Thus\nAnswer: $42$", "42")
    wrong = default_compute_score(source, r"Answer: \boxed{41}", ["42"])
    assert right == {"score": 1.0, "acc": True, "pred": "42"}
    assert wrong == {"score": -1.0, "acc": False, "pred": "41"}


def test_the_flexible_rule_takes_the_last_number_if_there_is_no_mark() -> None:
    assert gsm8k_flexible("First 6, then 42.", "42") == 1.0
    assert gsm8k_flexible("#### 41, not 42", "42") == 0.0


def test_a_data_source_without_a_rule_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(
        RewardError, match=r"'openai/gsm8', which has no rule.*'openai/gsm8k'.*reward\.function"
    ):
        default_compute_score("openai/gsm8", "", "1")


@pytest.mark.parametrize(
    ("given", "truth", "equal"),
    [
        (r"\frac{3}{4}", "0.75", True),
        (r"-\frac{1}{2}", "-0.5", True),
        ("1,000", "1000", True),
        (r"x = 5", "5", True),
        (r"12 \text{ cm}", "12", True),
        (r"90^\circ", "90", True),
        (r"\sqrt2", r"\sqrt{2}", True),
        (r"\text{Tuesday}", "tuesday", True),
        ("", "", False),
        (r"2\sqrt{2}", r"\sqrt{8}", False),
        ("1/0", "1", False),
    ],
)
def test_answers_are_equal_up_to_notation(given: str, truth: str, equal: bool) -> None:
    assert is_equal(given, truth) is equal


def test_a_box_may_contain_braces_and_must_be_closed() -> None:
    assert boxed(r"\boxed{1} and \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert boxed(r"\boxed{1") is None


async def test_rows_of_verl_are_scored_without_a_function_of_ones_own() -> None:
    reward = load_reward(RULES, timeout_s=10)
    assert (await reward(answering("#### 42"), row())).reward == 1.0
    assert (await reward(answering(""), row())).reward == 0.0  # the mark in the prompt does not count


FUNCTIONS = """
def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return {"score": float(ground_truth in solution_str), "text": solution_str, "turns": extra_info["num_turns"],
            "kept": extra_info["index"], "unknown": sorted(kwargs)}

def short(solution_str, ground_truth):
    return len(solution_str)

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return data_source == "openai/gsm8k"

def batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [text.count(truth) for text, truth in zip(solution_strs, ground_truths)]
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS)
    return path


async def test_a_function_with_verls_parameters_gets_the_text_of_the_response(functions: Path) -> None:
    reward = load_reward(f"{functions}:compute_score", timeout_s=10)
    turns = (
        {"role": "assistant", "content": "I multiply.", "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is 42."},
    )
    score = await reward(output(*turns), row(index=3))
    assert score.reward == 1.0
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
    assert score.extra == {
        "text": f"I multiply.\n{call}\n42\nIt is 42.", "turns": 4, "kept": 3, "unknown": []
    }  # fmt: skip


@pytest.mark.parametrize(("name", "expected"), [("short", 9.0), ("later", 1.0)])
async def test_a_function_may_take_fewer_parameters_and_be_async(
    functions: Path, name: str, expected: float
) -> None:
    reward = load_reward(f"{functions}:{name}", timeout_s=10)
    assert (await reward(answering("It is 42."), row())).reward == expected


async def test_a_batch_function_with_verls_parameters_scores_a_group(functions: Path) -> None:
    reward = load_batch_reward(f"{functions}:batch", timeout_s=10)
    results = await reward([answering(text) for text in ("42", "41", "42 42")], [row()] * 3)
    assert [result.score.reward if result.score else None for result in results] == [1.0, 0.0, 2.0]


def test_a_function_of_the_other_form_is_refused_with_the_remedy(functions: Path) -> None:
    with pytest.raises(ConfigError, match=r"leave reward\.batch=true out"):
        load_batch_reward(f"{functions}:compute_score", timeout_s=10)
    with pytest.raises(ConfigError, match=r"set reward\.batch=true"):
        load_reward(f"{functions}:batch", timeout_s=10)


CLASS = "class Solution:\n    def twice(self, x):\n        return x"
PROGRAM = "Here:\n```python\n{code}\n```"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "tests", "expected"),
    [
        ("print(int(input()) * 2)", {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10"]}, 1.0),
        ("print(4)", {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10"]}, 0.5),
        ("import sys\nsys.exit(0)", {"inputs": ["2"], "outputs": ["4"]}, 0.0),
        ("def twice(x):\n    return 2 * x", {"fn_name": "twice", "inputs": [[2]], "outputs": [4]}, 1.0),
        (CLASS, {"fn_name": "twice", "inputs": [[2]], "outputs": [4]}, 0),
        ("1 +", {"inputs": ["2"], "outputs": ["4"]}, 0.0),
    ],
)  # fmt: skip
async def test_code_is_scored_by_its_tests_in_the_sandbox(
    code: str, tests: dict[str, Any], expected: float
) -> None:
    reward = load_reward(RULES, timeout_s=60)
    assert (await reward(answering(PROGRAM.format(code=code)), row("taco", tests))).reward == expected


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
