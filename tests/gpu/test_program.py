"""The program that checks the package on a GPU runs to its end without one, and survives its stages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import devices
from benchmarks.gpu.program import INTERRUPTED, LEAST_S, OUT_OF_TIME, UNUSABLE, main, run_stages
from benchmarks.gpu.stage_process import ROOT, Stage, run_stage
from benchmarks.gpu.stages import STAGES
from benchmarks.gpu.verdicts import StageResult, exit_status


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "unused_gpu", lambda: None)


@pytest.mark.usefixtures("_no_gpu")
def test_without_a_gpu_every_stage_is_reported_as_not_run_and_the_status_is_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "results.json")]) == 0

    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert [stage["stage"] for stage in results["stages"]] == [stage.name for stage in STAGES]
    assert {(stage["verdict"], stage["reason"]) for stage in results["stages"]} == {("not run", "no GPU")}
    assert printed.count("not run: no GPU") == len(STAGES)


@pytest.mark.usefixtures("_no_gpu")
def test_a_gpu_that_torch_cannot_use_is_no_missing_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "unused_gpu", lambda: "/dev/nvidia0")

    assert main([]) == UNUSABLE
    assert "has a GPU (/dev/nvidia0), but torch" in " ".join(capsys.readouterr().err.split())


def test_the_status_is_0_only_if_all_stages_passed_or_have_no_gpu() -> None:
    passed, no_gpu = StageResult("a", "passed"), StageResult("b", "not run", reason="no GPU")

    assert exit_status([passed, no_gpu]) == 0
    assert exit_status([passed, StageResult("c", "failed")]) == 1
    assert exit_status([passed, StageResult("d", "not run", reason="interrupted")]) == 1
    assert exit_status([]) == 1


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_device_is_found_by_the_words_of_its_name(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    assert devices.peak_flops(torch.device("cuda")) == peak
    assert devices.peak_flops(torch.device("cpu")) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdicts", "reason"),
    [
        ("pass", ["passed"], ""),
        ("limit", ["passed", "failed"], ""),
        ("check error", ["passed", "failed", "passed"], ""),
        ("error", ["passed"], "exit status 1"),
        ("crash", ["passed"], "killed by SIGSEGV during the check: second"),
        ("exit", ["passed"], "ended before its last check"),
        ("left out", ["passed", "not run"], ""),
    ],
)
def test_however_a_stage_ends_its_checks_are_known(name: str, verdicts: list[str], reason: str) -> None:
    result = run_stage(faulty(name), device="cpu")

    assert result.verdict == ("passed" if name in ("pass", "left out") else "failed")
    assert [check.verdict for check in result.checks] == verdicts
    assert result.reason == reason


@pytest.mark.slow
def test_a_stage_that_hangs_fails_at_its_time_limit() -> None:
    result = run_stage(faulty("hang", time_limit_s=0.5), device="cpu")

    assert result.verdict == "failed"
    assert result.reason.startswith("exceeded its time limit of 0.5 s")


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_stage_and_names_what_was_not_run(sent: signal.Signals) -> None:
    code = """
        import sys
        from benchmarks.gpu.program import run_stages
        from tests.gpu.test_program import faulty
        sys.exit(run_stages([faulty("hang"), faulty("pass")], device="cpu", machine="", out=None))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        lines = iter(program.stdout.readline, "")
        stage = next(int(line.split()[1]) for line in lines if line.startswith("pid "))
        program.send_signal(sent)
        rest = program.stdout.read()

    assert program.returncode == INTERRUPTED
    assert rest.count("not run: interrupted") == 2
    with pytest.raises(ProcessLookupError):
        os.kill(stage, 0)


@pytest.mark.slow
def test_the_results_so_far_are_written_and_the_rest_is_left_out_when_the_time_is_over(
    tmp_path: Path,
) -> None:
    path = tmp_path / "gpu.json"
    stages = [faulty("crash"), faulty("hang"), faulty("pass")]

    assert run_stages(stages, device="cpu", machine="machine", out=path, seconds=LEAST_S + 12) == 1

    results = json.loads(path.read_text())
    crashed, hung, left_out = results["stages"]
    assert "Segmentation fault" in crashed["stacks"]
    assert "during the check: second" in hung["reason"]
    assert "time.sleep" in hung["stacks"] or "in run" in hung["stacks"]
    assert (left_out["verdict"], left_out["reason"]) == ("not run", OUT_OF_TIME)
    assert results["versions"]["torch"] == torch.__version__
    assert "killed by SIGSEGV" in path.with_suffix(".txt").read_text().replace("\n", " ")


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_runs_on_a_cpu_without_an_installed_package(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--stage", stage.name]

    status = subprocess.run(
        [*command, "--out", str(path)], cwd=ROOT, env={**os.environ, "PYTHONPATH": "src"}, check=False
    ).returncode

    assert status == 0, path.read_text()


def faulty(name: str, *, time_limit_s: float = 100) -> Stage:
    return Stage(name, "a stage that ends in the wrong way", "tests.gpu.faulty_stage", time_limit_s)
