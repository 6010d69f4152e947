"""The example that learns from a teacher: all its parts run one after the other, on few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import learn_from_teacher, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    run.main(["two_hop_lookup", "--out", str(path), "--steps", "2", "--skip-report"])
    return path


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "parts"),
    [
        (
            "sft",
            ["GRPO alone stopped: steps 1 to 10 had nothing to learn from", "step 3/3 loss", "NOT passed"],
        ),
        ("distillation", ["before: success 0.", "step 10/10 reward", "NOT passed: success went from 0."]),
    ],
)
def test_a_student_fails_alone_and_then_learns_from_a_teacher(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, parts: list[str]
) -> None:
    code = learn_from_teacher.main(
        [how, "--teacher", str(teacher), "--out", str(tmp_path), "--sft-steps", "3", "--steps", "10"]
    )

    shown = " ".join(capsys.readouterr().out.split())
    assert code == learn_from_teacher.EXIT_NOT_PASSED
    assert [part for part in parts if part not in shown] == []
