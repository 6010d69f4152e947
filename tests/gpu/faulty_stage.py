"""Stages that end in the wrong way, for the tests of the program. The name of the stage says how."""

from __future__ import annotations

import os
import signal
import time

import torch

from benchmarks.gpu.report import NotRun, StageReport


def run(device: torch.device, report: StageReport) -> None:
    """Pass a check, and then end as the name of the stage says."""
    with report.check("first") as check:
        check.figure("number", 1)
    match report.stage:
        case "limit":
            with report.check("second") as check:
                check.at_most("difference", float("nan"), 1.0)
        case "check error":
            with report.check("second"):
                raise ValueError("of the check")
            with report.check("third") as check:
                check.within("share", 0.5, 0, 1)
        case "error":
            raise ValueError("of the stage")
        case "crash":
            with report.check("second"):
                os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            with report.check("second"):
                print(f"pid {os.getpid()}", flush=True)
                time.sleep(3600)
        case "left out":
            with report.check("second"):
                raise NotRun("no library")
        case "exit":
            os._exit(0)
