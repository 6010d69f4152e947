"""Report of one stage: runs its checks, prints their progress, and writes each result to a file when it is known.

A crash of the process therefore loses only the check that was running.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.gpu.verdicts import CheckResult, Figure, Verdict

STARTED = "started: "
"""Prefix of the line that names the running check."""
ENDED = "ended"
"""Last line of a stage that ran to its end."""


class NotRun(Exception):
    """A check cannot be run here. The message is the reason."""


class Check:
    """Figures of one check."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self.faults: list[str] = []

    def figure(self, name: str, value: float, unit: str = "") -> None:
        """Record a number."""
        self.figures.append(Figure(name, float(value), unit))

    def at_most(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """Record a number that must not exceed a limit. NaN fails."""
        self._limited(name, value, unit, f"at most {limit:.3g}", is_kept=value <= limit)

    def within(self, name: str, value: float, low: float, high: float, unit: str = "") -> None:
        """Record a number that must be between two limits. NaN fails."""
        self._limited(name, value, unit, f"{low:g} to {high:g}", is_kept=low <= value <= high)

    def require(self, is_true: bool, message: str) -> None:
        """Fail the check with a message if a condition is false."""
        if not is_true:
            self.faults.append(message)

    def _limited(self, name: str, value: float, unit: str, limit: str, *, is_kept: bool) -> None:
        figure = Figure(name, float(value), unit, limit)
        self.figures.append(figure)
        self.require(bool(is_kept), str(figure))


class StageReport:
    """Report of a stage. Its checks run one after the other, and one that fails does not stop the others."""

    def __init__(self, stage: str, path: Path, *, model: Path | None = None) -> None:
        self.stage = stage
        self.model = model
        """Folder of a pretrained model, if the program has one."""
        self._path = path

    @contextmanager
    def check(self, name: str) -> Generator[Check]:
        """Run the body as a check. Exceptions fail the check, except `NotRun`."""
        self._write(STARTED + name)
        check, start_s = Check(), time.monotonic()
        verdict: Verdict = "passed"
        reason = trace = ""
        try:
            yield check
            if check.faults:
                verdict, reason = "failed", "; ".join(check.faults)
        except NotRun as error:
            verdict, reason = "not run", str(error)
        except Exception as error:  # noqa: BLE001  (a bug in the package is what the checks look for)
            traceback.print_exc()
            trace = traceback.format_exc()
            first_line = str(error).strip().partition("\n")[0]
            verdict, reason = "failed", f"{type(error).__name__}: {first_line}"
        result = CheckResult(name, verdict, time.monotonic() - start_s, tuple(check.figures), reason, trace)
        self._write(result.to_json())
        print(f"{self.stage}: {result} [{result.seconds:.1f} s]", flush=True)
        release_memory()

    def end(self) -> None:
        """Note that the stage ran to its end."""
        self._write(ENDED)

    def _write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line + "\n")


def release_memory() -> None:
    """Free the memory of deleted tensors, so that one check does not need the memory of two."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
