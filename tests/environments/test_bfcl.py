"""BFCL's multi-turn tasks: its gold calls are played through the tool loop, and judged by its own checkers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from agent_loop.checks.solutions import play_turns
from agent_loop.environments.bfcl import (
    CATEGORIES,
    CHECKERS,
    MISSING_CALLS,
    BfclEnvironment,
    BfclOptions,
    BfclSuite,
    entries_of,
    import_bfcl,
    json_schema_of,
    parse_call,
)
from agent_loop.environments.suite import SolutionTurn
from agent_loop.errors import ToolError
from agent_loop.tools.schema import check_tool_schema
from agent_loop.types import ToolCall
from tests.environments.suites import DONE, play

pytestmark = [pytest.mark.environments, pytest.mark.timeout(180)]

RESPONSE_MISMATCH = "multi_turn:execution_response_mismatch"
SUITE = BfclSuite()


def rows_of(task: str, **options: Any) -> list[dict[str, Any]]:
    return list(SUITE.rows(task, BfclOptions(**options)))


def row_of(name: str, **options: Any) -> dict[str, Any]:
    [row] = [row for row in rows_of(name.rpartition("_")[0], **options) if row["task"]["id"] == name]
    return row


def judge(row: dict[str, Any], turns: Sequence[SolutionTurn]) -> dict[str, Any]:
    """Return the reward for turns that are played in the environment alone."""
    environment = BfclEnvironment()
    environment.reset(row)
    for turn in turns:
        for call in turn.calls:
            environment.call(call.name, call.arguments)
        if not turn.calls:
            environment.reply([])
    reward = environment.reward([])
    assert isinstance(reward, dict)
    return reward


def edited(
    turns: Sequence[SolutionTurn],
    *,
    number: int,
    edit: Callable[[tuple[ToolCall, ...]], tuple[ToolCall, ...]],
) -> list[SolutionTurn]:
    """Return the turns with other calls in the turn of a number."""
    return [
        replace(turn, calls=edit(turn.calls)) if index == number else turn for index, turn in enumerate(turns)
    ]


def without_first(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    return calls[1:]


async def test_the_gold_calls_pass_every_turn_of_every_base_task_in_the_loop() -> None:
    rows = rows_of("multi_turn_base")
    assert len(rows) == 200
    for row in [*rows, *(row_of(f"{category}_0") for category in CATEGORIES[1:])]:
        output = (await play_turns(SUITE, row, SUITE.solution(row))).output
        assert output.reward_score == 1, row["task"]["id"]
        assert row not in rows or set(output.extra_fields["turn_scores"]) == {1.0}, row["task"]["id"]


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_gold_calls_solve_all_tasks_of_every_category(category: str) -> None:
    rows = rows_of(category)
    assert len(rows) == 200
    rewards = {row["task"]["id"]: judge(row, SUITE.solution(row)) for row in rows}
    solved = {"reward": 1.0, "turns_passed": 1.0, "first_failure": ""}
    assert {name: reward for name, reward in rewards.items() if reward != solved} == {}


def test_a_player_without_calls_solves_no_task() -> None:
    for category in CATEGORIES:
        for row in rows_of(category):
            num_turns = sum(not turn.calls for turn in SUITE.solution(row))
            reward = judge(row, [DONE] * num_turns)
            assert (reward["reward"], reward["first_failure"]) == (0.0, MISSING_CALLS)


def test_an_unfinished_trajectory_is_not_solved() -> None:
    row = row_of("multi_turn_base_0")
    reward = judge(row, SUITE.solution(row)[:-1])
    assert reward == {"reward": 0.0, "turns_passed": 0.75, "first_failure": "unfinished"}


def with_another_pattern(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    [change_folder, grep] = calls
    assert grep.name == "grep"
    return change_folder, structs.replace(grep, arguments={**grep.arguments, "pattern": "nothing"})


def test_a_wrong_call_in_one_turn_fails_that_turn_alone() -> None:
    row = row_of("multi_turn_base_0")
    output = play(SUITE, row, edited(SUITE.solution(row), number=2, edit=with_another_pattern)).output
    assert output.extra_fields["turn_scores"] == [1.0, 0.0, 1.0, 1.0]
    assert output.reward_score == 0
    assert output.extra_fields["turns_passed"] == 0.75
    assert output.extra_fields["first_failure"] == RESPONSE_MISMATCH


def test_a_failed_turn_ends_the_trajectory_if_the_option_says_so() -> None:
    row = row_of("multi_turn_base_0", stop_at_failure=True)
    output = play(SUITE, row, edited(SUITE.solution(row), number=2, edit=with_another_pattern)).output
    assert output.extra_fields["turn_scores"] == [1.0, 0.0]
    assert output.extra_fields["turns_passed"] == 0.25


@pytest.mark.parametrize("category", CATEGORIES)
def test_verdicts_agree_with_bfcls_own_checker(category: str) -> None:
    checker = import_bfcl(f"{CHECKERS}.multi_turn_checker")
    verdicts: list[bool] = []
    for index, row in enumerate(rows_of(category)):
        entry = entries_of(category)[row["task"]["id"]]
        gold: list[list[str]] = entry["gold"]
        skipped = [number for number, calls in enumerate(gold) if calls][index % 2]
        steps = [[calls[1:] if number == skipped else calls] for number, calls in enumerate(gold)]
        turns = SUITE.solution(row)
        place = [number for number, turn in enumerate(turns) if turn.calls][index % 2]
        reward = judge(row, edited_or_dropped(turns, number=place))
        verdict = checker.multi_turn_checker(steps, gold, entry, category, f"checked_{category}")
        assert (reward["reward"] == 1, reward["first_failure"]) == (
            verdict["valid"],
            verdict.get("error_type", ""),
        )
        verdicts.append(verdict["valid"])
    assert verdicts.count(False) > 100


def edited_or_dropped(turns: Sequence[SolutionTurn], *, number: int) -> list[SolutionTurn]:
    """Return the turns without the first call of one of them, and without the turn if that was its only call."""
    turns = edited(turns, number=number, edit=without_first)
    return [turn for turn in turns if turn.calls or turn.text]


def test_withheld_functions_can_be_called_from_the_turn_that_names_them() -> None:
    environment = BfclEnvironment()
    environment.reset(row_of("multi_turn_miss_func_0"))
    shown = {tool.name: tool.is_shown for tool in environment.tools()}
    assert [name for name, is_shown in shown.items() if not is_shown] == ["sort"]
    assert "cp" not in shown  # excluded in this task
    for _ in range(2):
        assert '"name": "sort"' not in environment.reply([]).content
    with pytest.raises(ToolError, match="there is no tool 'sort'"):
        environment.call("sort", {"file_name": "final_report.pdf"})
    content = environment.reply([]).content
    assert json.loads(content.partition("\n")[0])[0]["parameters"]["type"] == "object"
    assert '"name": "sort"' in content
    assert (
        environment.call("sort", {"file_name": "final_report.pdf"})
        == '{"error": "sort: final_report.pdf: No such file or directory"}'
    )


def test_the_model_reads_the_exception_of_a_call_as_bfcls_executor_writes_it() -> None:
    environment = BfclEnvironment()
    environment.reset(row_of("multi_turn_base_0"))
    assert environment.call("cd", {"path": "document"}).startswith("Error during execution: ")
    assert json.loads(environment.call("pwd", {})) == {"current_working_directory": "/workspace"}


def test_trajectories_of_a_task_do_not_share_their_state() -> None:
    first, second = BfclEnvironment(), BfclEnvironment()
    for environment in (first, second):
        environment.reset(row_of("multi_turn_base_0"))
    first.call("cd", {"folder": "document"})
    assert "/workspace/document" in first.call("pwd", {})
    assert "/workspace/document" not in second.call("pwd", {})


def test_every_tool_has_a_valid_schema_in_json_schemas_own_types() -> None:
    for row in rows_of("multi_turn_base"):
        environment = BfclEnvironment()
        environment.reset(row)
        for tool in environment.tools():
            check_tool_schema(tool.schema, where=tool.name)


def test_bfcls_types_become_those_of_json_schema() -> None:
    converted = json_schema_of(
        {
            "type": "dict",
            "properties": {"x": {"type": "array", "items": {"type": "float"}}, "y": {"type": "tuple"}},
        }
    )
    assert converted == {
        "type": "object",
        "properties": {"x": {"type": "array", "items": {"type": "number"}}, "y": {"type": "array"}},
    }


def test_a_call_is_parsed_and_never_evaluated() -> None:
    signatures = {"sort": ["file_name"], "mean": ["numbers"]}
    assert parse_call("sort('a.txt')", signatures=signatures) == ToolCall("sort", {"file_name": "a.txt"})
    assert parse_call("mean(numbers=[1, -2.5])", signatures=signatures).arguments == {"numbers": [1, -2.5]}
    for text in ("sort(open('a.txt'))", "'a.txt'", "a.sort('a.txt')"):
        with pytest.raises(ValueError, match=r"malformed|not a call"):
            parse_call(text, signatures=signatures)
