"""Recorded trajectories as a workload, and `agent-loop simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.errors import ConfigError, DataError
from agent_loop.simulation.replay import read_plans, repeat_plans
from agent_loop.simulation.workload import PlannedTurn
from agent_loop.storage.json_lines import write_lines
from agent_loop.trajectory import AgentLoopMetrics, AgentLoopOutput, Trajectory


def recorded(folder: Path) -> Path:
    output = AgentLoopOutput(
        prompt_ids=[1] * 30,
        response_ids=[2] * 60,
        response_mask=[1] * 20 + [0] * 5 + [1] * 10 + [0] * 15 + [1] * 10,
        metrics=AgentLoopMetrics(tool_calls=3.0),
    )
    silent = AgentLoopOutput(prompt_ids=[1], response_ids=[], response_mask=[])
    trajectories = [
        Trajectory(output=out, row={}, group=group, rollout=0, reward=None, reward_extra={})
        for group, out in enumerate([output, silent, output])
    ]
    write_lines(folder / "step" / "trajectories.jsonl", trajectories, split="rollout")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    return folder


def test_recorded_trajectories_become_plans(tmp_path: Path) -> None:
    plans = read_plans(recorded(tmp_path))
    assert [plan.group for plan in plans] == [0, 2]
    assert plans[0].num_prompt_tokens == 30
    assert plans[0].turns == (PlannedTurn(20, 1.5, 5), PlannedTurn(10, 1.5, 15), PlannedTurn(10, 0.0, 0))
    assert plans[0].starts == (30, 55, 80, 90)
    assert (plans[0].num_tokens, plans[0].tool_s) == (40, 3.0)
    assert (plans[0].tokens_left(55), plans[0].tokens_left(58)) == (10, 7)


def test_a_small_run_can_be_repeated_as_a_large_one(tmp_path: Path) -> None:
    plans = repeat_plans(read_plans(recorded(tmp_path)), times=3)
    assert len({plan.id for plan in plans}) == 6
    assert [plan.group for plan in plans] == [0, 2, 3, 5, 6, 8]
    assert {plan.turns for plan in plans} == {plans[0].turns}


def test_files_without_records_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no recorded trajectories"):
        read_plans(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        read_plans(tmp_path / "missing.jsonl")
    (tmp_path / "torn.jsonl").write_text('{"segments": [', encoding="utf-8")
    with pytest.raises(DataError, match=r"torn.jsonl' is a file of another kind"):
        read_plans(tmp_path)


def test_the_command_prints_statistics_as_a_table_and_as_json(tmp_path: Path) -> None:
    runner = CliRunner()
    command = [
        "simulate",
        "--servers",
        "2",
        "--trajectories",
        "20",
        "--fail",
        "1@5+10",
        "--slow-share",
        "0.5",
    ]
    shown = runner.invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "to a perfect pool" in shown.output
    as_json = runner.invoke(app, [*command, "--replay", str(recorded(tmp_path)), "--no-perfect", "--json"])
    assert as_json.exit_code == 0, as_json.output
    figures = json.loads(as_json.stdout)
    assert (figures["num_trajectories"], figures["num_failed"], figures["to_perfect"]) == (20, 0, None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--policy", "least_work"], "did you mean 'least-work'"),
        (["--fail", "soon"], "give the number of a server and seconds, as in 3@60"),
    ],
)
def test_the_command_explains_invalid_options(arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert expected in str(result.exception)
