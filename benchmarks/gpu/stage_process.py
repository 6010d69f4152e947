"""One stage in a process of its own, with a time limit, so that a crash or a hang does not take the other stages.

    python -m benchmarks.gpu.stage_process MODULE NAME DEVICE FOLDER [MODEL]

runs the function `run` of a module, which writes its results to a file of the folder. The program reads them when the
process has ended, however it ended. A crash and the time limit leave the stacks of all threads in another file.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu.verdicts import CheckResult, StageResult, verdict_of

ROOT = Path(__file__).parents[2]
GRACE_S = 5.0
"""Seconds between the request to end and the kill of a process."""
STACKS_S = 1.0
"""Seconds that a process has to write its stacks."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ON_CPU = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""One thread, and a C library that returns freed memory at once, so that the resident size is that of live tensors."""
CHECKS, STACKS = "checks.jsonl", "stacks.txt"


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, by the module that holds its function `run(device, report)`."""

    name: str
    title: str
    module: str
    time_limit_s: float


def run_stage(stage: Stage, *, device: str, model: Path | None = None) -> StageResult:
    """Run a stage in a new process and return its result. An exception ends the process."""
    start_s = time.monotonic()
    with TemporaryDirectory() as name:
        folder = Path(name)
        how_it_ended = _run_process(stage, device=device, folder=folder, model=model)
        result = _read(stage, _text(folder / CHECKS).splitlines(), how_it_ended)
        stacks = _text(folder / STACKS)
    return replace(result, seconds=time.monotonic() - start_s, stacks=stacks)


def _run_process(stage: Stage, *, device: str, folder: Path, model: Path | None) -> str:
    """Run the process and return why it did not succeed; an empty text if it did."""
    command = [sys.executable, "-m", __name__, stage.module, stage.name, device, str(folder)]
    command += [] if model is None else [str(model)]
    environment = {**os.environ, **OFFLINE, **(ON_CPU if device == "cpu" else {})}
    # A session of its own: Ctrl-C reaches this program alone, and all children of the stage can be ended together.
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait(stage.time_limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)  # writes the stacks
        with suppress(subprocess.TimeoutExpired):
            process.wait(STACKS_S)
        return f"exceeded its time limit of {stage.time_limit_s:g} s"
    finally:
        if process.returncode != 0:
            _end_session(process)
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}" if status else ""


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children: first by a request, which lets the trackers of shared memory clean up."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(stage: Stage, lines: list[str], how_it_ended: str) -> StageResult:
    """Return the result that the lines of the file tell. A stage without its last line has failed."""
    from benchmarks.gpu.report import ENDED, STARTED

    checks = [CheckResult.parse(line) for line in lines if line.startswith("{")]
    if lines and lines[-1] == ENDED and not how_it_ended:
        verdict = verdict_of(checks)
        reason = "; ".join(check.reason for check in checks) if verdict == "not run" else ""
        return StageResult(stage.name, verdict, checks=tuple(checks), reason=reason)
    running = lines[-1].removeprefix(STARTED) if lines and lines[-1].startswith(STARTED) else ""
    reason = how_it_ended or "ended before its last check"
    if running:
        reason += f" during the check: {running}"
    return StageResult(stage.name, "failed", checks=tuple(checks), reason=reason)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def main(module: str, name: str, device: str, folder: str, model: str | None = None) -> None:
    """Run a stage in this process."""
    stacks = (Path(folder) / STACKS).open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    import torch

    from benchmarks.gpu.report import StageReport

    if device == "cpu":
        torch.set_num_threads(1)
    report = StageReport(name, Path(folder) / CHECKS, model=None if model is None else Path(model))
    importlib.import_module(module).run(torch.device(device), report)
    report.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
