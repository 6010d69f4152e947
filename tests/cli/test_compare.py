"""`agent-loop compare` prints means over seeds and differences of groups of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.project import run
from tests.run_folders import write_rewards, write_run


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_groups(*, num_steps: int = 20) -> None:
    """Write runs of three seeds whose rewards rise to 0.2 (group a) and 1.0 (group b), plus 0.01 per seed."""
    for seed in range(3):
        for name, end in (("a", 0.2), ("b", 1.0)):
            lines: list[dict[str, float]] = [
                {"reward/mean": end * step / num_steps + seed / 100} for step in range(1, num_steps + 1)
            ]
            for line in lines[4::5]:
                line["val/pass@1"] = line["reward/mean"]
            write_run(Path(f"runs/{name}-{seed}"), seed=seed, lines=lines)


def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def numbers(*arguments: str) -> dict[str, Any]:
    return json.loads(run("compare", *arguments, "--json").stdout)


def test_two_groups_are_printed_with_means_differences_and_curves() -> None:
    write_groups()
    text = run("compare", "runs/a-*", "runs/b-*").output
    lines = lines_of(text)
    # mean of the last value of a: 0.21, and half of the width: 4.3027 * 0.01 / sqrt(3) = 0.0248
    assert lines[:4] == [
        "A runs/a-*: 3 runs, trainer.seed 0, 1, 2",
        "B runs/b-*: 3 runs, trainer.seed 0, 1, 2",
        "Intervals are 95% intervals over runs.",
        "B - A is paired by seed.",
    ]
    first = lines.index("reward/mean: 20 steps")
    assert lines[first + 1 : first + 4] == [
        "last value (step 20) mean of the last 10 values",
        "A 0.210 (0.185 .. 0.235) 0.165 (0.140 .. 0.190)",
        "B 1.010 (0.985 .. 1.035) 0.785 (0.760 .. 0.810)",
    ]
    assert lines[first + 4].startswith("B - A +0.800 ")
    assert "step A B" in lines
    assert "1 0.020 ± 0.025 0.060 ± 0.025" in lines
    assert "20 0.210 ± 0.025 1.010 ± 0.025" in lines
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    first = lines.index("val/pass@1: 4 steps")
    assert "mean of the last 4 values" in lines[first + 1]
    rows = lines[lines.index("step A B", first) + 1 :][:4]
    assert [row.split()[0] for row in rows] == ["5", "10", "15", "20"]


def test_json_has_the_printed_numbers() -> None:
    write_groups()
    found = numbers("runs/a-*", "runs/b-*", "--last", "1", "--points", "3", "--metric", "reward/mean")
    names = [(each["name"], each["source"]) for each in found["groups"]]
    assert names == [("A", "runs/a-*"), ("B", "runs/b-*")]
    assert found["groups"][1]["runs"][2] == {"path": "runs/b-2", "seed": 2}
    (metric,) = found["metrics"]
    assert (metric["metric"], metric["num_steps"], metric["num_recent"]) == ("reward/mean", 20, 1)
    assert metric["last"] == metric["recent"]
    assert metric["last"]["groups"][0]["value"] == pytest.approx(0.21)
    assert metric["last"]["groups"][0]["high"] == pytest.approx(0.21 + 4.3026527 * 0.01 / 3**0.5)
    assert metric["last"]["differences"][0]["value"] == pytest.approx(0.8)
    assert [point["step"] for point in metric["curve"]] == [1, 11, 20]


def test_groups_with_other_seeds_are_not_paired_and_steps_that_a_run_lacks_are_left_out() -> None:
    for seed in range(2):
        write_rewards(Path(f"runs/a-{seed}"), seed=seed, rewards=[float(seed)])
        write_rewards(Path(f"runs/b-{seed}"), seed=seed + 1, rewards=[seed + 5.0])
    text = run("compare", "runs/a-*", "runs/b-*").output
    assert "B - A is not paired: the seeds of the groups differ." in text
    assert "+5.000 (+1.958 .. +8.042)" in text  # 4.3027 * sqrt(0.5)
    write_rewards(Path("more/c-0"), seed=0, rewards=[0.5, 0.5, 0.5])
    write_rewards(Path("more/c-1"), seed=1, rewards=[0.5, None])
    assert "reward/mean: 1 step; left out: 2 without a value in more/c-1" in run("compare", "more").output


def test_one_run_has_no_interval_and_the_output_says_so() -> None:
    write_rewards(Path("a"), seed=0, rewards=[0.5])
    write_rewards(Path("b"), seed=0, rewards=[0.75])
    text = run("compare", "a", "b").output
    assert "There is no interval for A and B: one run does not show a spread." in text
    assert "B - A +0.250" in lines_of(text)
    assert "paired" not in text
