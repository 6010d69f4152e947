"""Generators of reasoning-gym, whose own answers are played through the loop of environments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from agent_loop.environments.reasoning_gym import NOT_LISTED, ReasoningGymSuite, _dataset
from agent_loop.environments.suite import SolutionTurn
from agent_loop.environments.tasks import parse_task_name, suite_rows
from agent_loop.errors import ConfigError, DataError
from agent_loop.rollout.rows import load_rows
from tests.environments.suites import play

pytestmark = pytest.mark.environments

SUITE = ReasoningGymSuite()
ROWS_PER_GENERATOR = 3
NO_ANSWER = {
    "boxnet": "its scorer runs a plan, and the generator makes none",
    "graph_color": "any valid colouring scores 1, and the generator makes none",
    "propositional_logic": "its scorer proves a conclusion, and the generator makes none",
    "rubiks_cube": "any sequence of moves that solves the cube scores 1, and the generator makes none",
    "rush_hour": "any sequence of moves that frees the car scores 1, and the generator makes none",
}
"""Generators without an answer of their own, each with the reason."""


@pytest.fixture(autouse=True)
def _warnings_of_scorers(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """Accept what NumPy warns of when a scorer parses an answer that is no matrix."""
    yield
    assert all("loadtxt" in str(each.message) for each in recwarn if each.category is UserWarning)


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    return suite_rows(SUITE, parse_task_name(f"reasoning_gym:{name}", suite=SUITE))


def reward(row: dict[str, Any], *texts: str) -> float:
    trajectory = play(SUITE, row, [SolutionTurn(text=text) for text in texts])
    assert trajectory.reward is not None
    return trajectory.reward


def test_every_generator_of_the_package_is_a_task() -> None:
    from reasoning_gym.factory import DATASETS

    assert len(DATASETS) >= 106
    assert {*SUITE.tasks()} | NOT_LISTED == {*DATASETS}
    assert len(SUITE.tasks()) - len(NO_ANSWER) >= 100


def test_every_answer_of_every_generator_scores_1_and_an_empty_turn_less() -> None:
    without_answer: set[str] = set()
    for generator in SUITE.tasks():
        for row in islice(rows_of(f"{generator}?seed=3"), ROWS_PER_GENERATOR):
            solution = SUITE.solution(row)
            nothing = reward(row)
            if solution is None:
                without_answer.add(generator)
                assert nothing < 1, generator
            else:
                gold = reward(row, *(turn.text for turn in solution))
                assert (gold, nothing < gold) == (1.0, True), f"{generator}: {gold}, {nothing}"
    assert without_answer == {*NO_ANSWER}


@pytest.mark.parametrize("generator", ["acre", "list_functions", "gsm_symbolic", "word_ladder", "chain_sum"])
def test_rows_hold_what_makes_their_entry_again_in_another_process(generator: str) -> None:
    rows = list(islice(rows_of(f"{generator}?seed=1"), 60))
    sent = [json.loads(json.dumps(row)) for row in rows]
    _dataset.cache_clear()
    for row in reversed(sent):
        SUITE.environment().reset(row)
    assert list(islice(rows_of(f"{generator}?seed=1"), 60)) == rows


def test_a_row_of_another_version_of_the_generator_fails_with_the_reason() -> None:
    [row] = islice(rows_of("chain_sum"), 1)
    changed = {**row, "raw_prompt": [{"role": "user", "content": "1 + 1?"}]}
    with pytest.raises(DataError, match="makes another question than the row's for"):
        SUITE.environment().reset(changed)


def test_the_answer_is_the_text_in_the_last_tags_or_else_the_whole_turn() -> None:
    [row] = islice(rows_of("chain_sum?seed=5"), 1)
    [turn] = SUITE.solution(row) or ()
    bare = turn.text.removeprefix("<answer>").removesuffix("</answer>")
    assert reward(row, bare) == 1
    assert reward(row, f"<think>so</think> <answer>no</answer> or <answer> {bare}\n</answer>.") == 1
    assert reward(row, f"<answer>{bare}</answer> <answer>no</answer>") < 0.1


def test_an_answer_that_a_scorer_cannot_read_scores_0_with_the_reason() -> None:
    [row] = islice(rows_of("prime_factorization?seed=5"), 1)
    trajectory = play(SUITE, row, [SolutionTurn(text="<answer>two</answer>")])
    assert trajectory.reward == 0
    assert "ValueError" in trajectory.output.extra_fields["scorer_error"]


def test_options_change_the_generator_and_the_system_prompt() -> None:
    name = "chain_sum?size=20&min_terms=5&max_terms=5&system_prompt=Add%20up."
    for row in load_rows([f"reasoning_gym:{name}"], prompt_key="prompt"):
        system, question = row["raw_prompt"]
        assert system == {"role": "system", "content": "Add up."}
        assert sum(question["content"].count(sign) for sign in (" + ", " - ")) == 4
        assert row["task"]["config"] == {"min_terms": 5, "max_terms": 5}
    [row] = islice(rows_of("chain_sum?system_prompt="), 1)
    assert [message["role"] for message in row["raw_prompt"]] == ["user"]
    [row] = islice(rows_of("chain_sum"), 1)
    assert "<answer>" in row["raw_prompt"][0]["content"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("min_term=5", "reasoning_gym:chain_sum has no option 'min_term'; did you mean 'min_terms'?"),
        ("min_terms=9", r"reasoning_gym:chain_sum refuses \{\"min_terms\": 9\}: AssertionError"),
        ("min_terms=many", r"refuses \{\"min_terms\": \"many\"\}: TypeError"),
        ("size=0", "size is '0'"),
    ],
)
def test_a_wrong_option_is_a_clear_error(options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(rows_of(f"chain_sum?{options}"))
