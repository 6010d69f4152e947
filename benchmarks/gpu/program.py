"""The program: runs the stages one after the other, prints the table of verdicts, and returns the exit status.

    python -m benchmarks.gpu [--minutes N] [--stage NAME]... [--out FILE] [--model FOLDER] [--device cpu]

The exit status is 0 if every stage that was asked for passed or was not run because the machine has no GPU, no vLLM or
no pretrained model. It is 1 if a stage failed, crashed, exceeded its time limit, or was not run for another reason, 2
if torch cannot use the machine's GPU, and 130 after Ctrl-C. The results so far are written whenever a stage ends.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console

from benchmarks.gpu.stage_process import Stage, run_stage
from benchmarks.gpu.stages import STAGES
from benchmarks.gpu.verdicts import NO_GPU, StageResult, exit_status, table_of, write_results

UNUSABLE = 2
INTERRUPTED = 130
LEAST_S = 15.0
"""Seconds that must be left for another stage to start."""
OUT_OF_TIME = "out of time"
PACKAGES = ("torch", "transformers", "triton", "numpy", "peft", "bitsandbytes", "vllm")
"""Packages whose versions are written beside the results."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.model is not None and not options.model.is_dir():
        parser.error(f"--model is {str(options.model)!r}, which is not a folder; give the folder of a model")
    try:
        from benchmarks.gpu.devices import device_of

        device, machine = device_of(options.device)
    except (ImportError, RuntimeError) as error:
        Console(stderr=True).print(f"no stage was run: {error}", style="red", highlight=False, markup=False)
        return UNUSABLE
    stages = [stage for stage in STAGES if options.stage is None or stage.name in options.stage]
    return run_stages(
        stages,
        device=device and str(device),
        machine=machine,
        out=options.out,
        model=options.model and options.model.resolve(),
        seconds=60 * options.minutes,
    )


def run_stages(
    stages: Sequence[Stage],
    *,
    device: str | None,
    machine: str,
    out: Path | None,
    model: Path | None = None,
    seconds: float = float("inf"),
) -> int:
    """Run stages, print the table, and return the exit status.

    Args:
        stages: Stages to run.
        device: Name of the device. None means that the machine has no GPU, and runs no stage.
        machine: Description of the machine, for the table.
        out: File for the results as JSON; the table is written beside it. None writes no file.
        model: Folder of a pretrained model.
        seconds: Time for all stages. The last ones are left out when it is over.
    """
    results: list[StageResult] = []
    ends_at = time.monotonic() + seconds
    versions = _versions()
    is_interrupted = False
    of_sigterm = signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops as Ctrl-C does
    try:
        for number, stage in enumerate(stages, start=1):
            left_s = ends_at - time.monotonic()
            if device is None or left_s < LEAST_S:
                reason = NO_GPU if device is None else OUT_OF_TIME
                results.append(StageResult(stage.name, "not run", reason=reason))
                continue
            print(f"[{number}/{len(stages)}] {stage.name}: {stage.title}", flush=True)
            limited = replace(stage, time_limit_s=min(stage.time_limit_s, round(left_s, 1)))
            results.append(run_stage(limited, device=device, model=model))
            if out is not None:
                write_results(results, out, machine=machine, versions=versions)
    except KeyboardInterrupt:
        is_interrupted = True
        rest = stages[len(results) :]
        results += [StageResult(stage.name, "not run", reason="interrupted") for stage in rest]
    finally:
        signal.signal(signal.SIGTERM, of_sigterm)
    Console().print(table_of(results, machine=machine))
    if out is not None:
        write_results(results, out, machine=machine, versions=versions)
    return INTERRUPTED if is_interrupted else exit_status(results)


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Check the package on a GPU, and measure it. The exit status is 0 if every stage passed, or none "
        "was run because the machine has no GPU.",
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument("--minutes", type=float, default=10, help="time for all stages (default: 10)")
    parser.add_argument("--stage", action="append", choices=names, help="run this stage; may be repeated")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write all results to this JSON file, and a table beside it"
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="pretrained model for the last stage")
    parser.add_argument(
        "--device",
        choices=["auto", "cpu"],
        default="auto",
        help="`cpu` runs the stages on tiny models without a GPU, as a check of the checks",
    )
    return parser
