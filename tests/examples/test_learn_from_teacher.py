"""The example that learns from a teacher: all its parts run one after the other, on few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import learn_from_teacher, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_student_fails_alone_and_then_learns_from_the_trajectories_of_a_teacher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher, out = tmp_path / "teacher", tmp_path / "student"
    run.main(["two_hop_lookup", "--out", str(teacher), "--steps", "2", "--skip-report"])
    capsys.readouterr()

    code = learn_from_teacher.main(
        ["--teacher", str(teacher), "--out", str(out), "--sft-steps", "3", "--steps", "1"]
    )

    shown = " ".join(capsys.readouterr().out.split())
    assert code == learn_from_teacher.EXIT_NOT_PASSED
    assert "random weights: success 0.0%" in shown
    assert "GRPO alone stopped: steps 1 to 10 had nothing to learn from" in shown
    assert "step 3/3 loss" in shown
    assert "NOT passed: 0.0%" in shown
