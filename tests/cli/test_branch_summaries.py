"""Summaries of stored trajectories count a rollout once, even if it has several branches."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import agent_loop.viewer
from agent_loop.cli.rollout import _summary
from agent_loop.storage.writer import write_trajectories
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, as_token_ids
from tests.cli.stored_project import run


def trajectory(rollout: int, reward: float | None, branch: int | None = None) -> Trajectory:
    segments = [
        Segment(as_token_ids([1]), Origin.PROMPT),
        Segment(as_token_ids([2] * (rollout + 1)), Origin.MODEL, weight_version=0),
    ]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!" * (rollout + 1)}]
    output = AgentLoopOutput(segments=segments, messages=messages)
    return Trajectory(output, {"raw_prompt": messages[:1]}, 0, rollout, reward, {}, branch)


TRAJECTORIES = [trajectory(0, 1.0), *(trajectory(1, 0.0, branch) for branch in range(3))]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    write_trajectories(
        Path("run/rollout.parquet"), TRAJECTORIES, step=0, split="rollout", success_threshold=1.0
    )
    Path("task.py").write_text("def reward(output, row):\n    return float(len(output.answer) == 2)\n")
    return tmp_path


def test_show_prints_the_mean_reward_of_rollouts(stored: Path) -> None:
    assert "4 trajectories, mean reward 0.500" in run("show", "run").output


def test_rescore_compares_means_of_rollouts(stored: Path) -> None:
    lines = run("rescore", "run", "--reward", "task.py:reward").output.splitlines()
    cells = {line.split("  ")[0].strip(): line.split()[-2:] for line in lines if line.strip()}
    assert cells["mean reward"] == ["0.5000", "0.5000"]
    assert cells["success"] == ["50.0%", "50.0%"]
    assert cells["scored"] == ["4", "4"]


def test_the_table_of_the_rollout_command_has_mean_rewards_of_rollouts() -> None:
    columns = {str(column.header): list(column.cells) for column in _summary(TRAJECTORIES).columns}
    assert columns["mean reward"] == ["0.500"]
    assert columns["trajectories"] == ["4"]


@pytest.mark.skipif(shutil.which("node") is None, reason="runs a module of the viewer")
def test_the_viewer_shows_means_of_rollouts() -> None:
    module = Path(agent_loop.viewer.__file__).parent / "static" / "rollout_means.js"
    script = f"""
    import {{ meanOverRollouts }} from {json.dumps(module.as_uri())};
    const column = (values, kind = "number") => ({{ values, kind }});
    const columns = {{
      split: column([0, 0, 0, 0, 0]), step: column([1, 1, 1, 1, 1]), group: column([0, 0, 0, 0, 0]),
      rollout: column([0, 1, 1, 1, 2]), branch: column([NaN, 0, 1, 2, NaN]),
      reward: column([1, 0, 0.5, NaN, NaN]), is_success: column([1, 0, 1, 2, 2], "flag"),
    }};
    const table = {{ column: (name) => columns[name] }};
    const rows = [0, 1, 2, 3, 4];
    const means = ["reward", "is_success", "nothing"].map((name) => meanOverRollouts(table, name, rows));
    delete columns.branch;
    console.log(JSON.stringify([...means, meanOverRollouts(table, "reward", rows)]));
    """
    found = subprocess.run(
        ["node", "--input-type=module", "--eval", script], capture_output=True, text=True, check=True
    )
    assert json.loads(found.stdout) == [0.625, 0.75, None, 0.5]
