"""`agent-loop tasks`, and the other commands with names of tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.project import Command
from tests.environments.sums import use_sums


@pytest.fixture(autouse=True)
def _suites(monkeypatch: pytest.MonkeyPatch) -> None:
    use_sums(monkeypatch)


def test_tasks_lists_suites_and_how_to_install_those_that_are_missing(command: Command) -> None:
    result = command("tasks")
    assert result.exit_code == 0, result.err
    [sums] = [line for line in result.out.splitlines() if line.startswith("│ sums")]
    assert [cell.strip() for cell in sums.split("│")[1:4]] == ["sums", "4", "sums of two numbers"]
    [absent] = [line for line in result.out.splitlines() if line.startswith("│ absent")]
    assert absent.split("│")[2].strip() == "not installed"
    assert 'pip install "agent-loop[absent]"' in result.out


def test_tasks_show_lists_the_tasks_and_options_of_a_suite(command: Command) -> None:
    result = command("tasks", "show", "sums")
    assert result.out.splitlines()[:4] == ["sums:easy", "sums:same", "sums:broken", "sums:unsolvable"]
    assert "options: split (train or val), size, seed, most" in result.out


def test_tasks_show_prints_three_rows_the_tools_and_the_reward(command: Command) -> None:
    result = command("tasks", "show", "sums:easy?seed=3")
    assert [line for line in result.out.splitlines() if line.startswith("user: ")] == [
        "user: 3 + 1",
        "user: 4 + 1",
        "user: 5 + 1",
    ]
    assert '"environment": "sums"' in result.out
    assert result.out.splitlines()[-4:] == ["tools", "none", "reward", "reward: 1 for the sum"]


def test_check_tasks_plays_the_solution_and_an_empty_turn_for_every_row_of_a_name(command: Command) -> None:
    result = command("check", "tasks", "sums:easy?size=4&split=val", "--json")
    assert result.exit_code == 0, result.err
    reports = json.loads(result.out)
    assert [(report["name"], report["nothing"], report["solution"]) for report in reports] == [
        (f"sums:easy row {number}", 0.0, 1.0) for number in (1, 2, 3, 4)
    ]


def test_check_tasks_fails_for_a_wrong_solution(command: Command) -> None:
    result = command("check", "tasks", "sums:unsolvable", "--limit", "2")
    assert result.exit_code == 1
    assert "sums:unsolvable row 1: the solution scores 0 instead of 1" in result.out
    assert "0 of 2 tasks passed" in result.out


def test_settings_of_workspaces_are_refused_for_a_name_and_a_limit_for_a_folder(command: Command) -> None:
    result = command("check", "tasks", "sums:easy", "container.runtime=docker")
    assert (result.exit_code, "'sums:easy' has no workspace" in result.err) == (2, True)
    result = command("check", "tasks", "model", "--limit", "2")
    assert (result.exit_code, "--limit is for rows of a name" in result.err) == (2, True)


def test_rollout_plays_a_name_and_writes_its_columns(command: Command) -> None:
    result = command("rollout", "config.yaml", "--data", "sums:easy?size=2", "--out", "sums.jsonl")
    assert result.exit_code == 0, result.err
    records = [json.loads(line) for line in Path("sums.jsonl").read_text().splitlines()]
    assert [record["row"]["total"] for record in records] == [1, 1, 2, 2]
    assert {record["row"]["data_source"] for record in records} == {"sums:easy"}
    assert {record["reward"] for record in records} == {0.0}


def test_eval_scores_a_name_by_its_data_source(command: Command) -> None:
    result = command("eval", "config.yaml", "--data", "sums:easy?size=2", "--data", "sums:same?size=1")
    assert result.exit_code == 0, result.err
    assert "sums:easy" in result.out
    assert "sums:same" in result.out
