"""The program: runs the stages one after the other, prints the table of verdicts, and returns the exit status.

    python -m tests.gpu [--stage NAME]... [--out FILE] [--device cpu]

The exit status is 0 if every stage that was asked for passed or was not run because the machine has no GPU. It is 1
if a stage failed, crashed, exceeded its time limit, or was not run for another reason, 2 if torch cannot use the
machine's GPU, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.gpu.stage_process import Stage, run_stage
from tests.gpu.stages import STAGES
from tests.gpu.verdicts import NO_GPU, StageResult, exit_status, print_table, write_results

UNUSABLE = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        from tests.gpu.devices import device_of

        device, machine = device_of(options.device)
    except (ImportError, RuntimeError) as error:
        Console(stderr=True).print(f"no stage was run: {error}", style="red", highlight=False, markup=False)
        return UNUSABLE
    stages = [stage for stage in STAGES if options.stage is None or stage.name in options.stage]
    return run_stages(stages, device=device and str(device), machine=machine, out=options.out)


def run_stages(stages: Sequence[Stage], *, device: str | None, machine: str, out: Path | None) -> int:
    """Run stages, print the table, and return the exit status.

    Args:
        stages: Stages to run.
        device: Name of the device; None if there is no GPU, in which case no stage is run.
        machine: Description of the machine, for the table.
        out: File for the results as JSON. None writes no file.
    """
    results: list[StageResult] = []
    is_interrupted = False
    of_sigterm = signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops as Ctrl-C does
    try:
        for number, stage in enumerate(stages, start=1):
            if device is None:
                results.append(StageResult(stage.name, "not run", reason=NO_GPU))
                continue
            print(f"[{number}/{len(stages)}] {stage.name}: {stage.title}", flush=True)
            results.append(run_stage(stage, device=device))
    except KeyboardInterrupt:
        is_interrupted = True
        rest = stages[len(results) :]
        results += [StageResult(stage.name, "not run", reason="interrupted") for stage in rest]
    finally:
        signal.signal(signal.SIGTERM, of_sigterm)
    print_table(results, machine=machine)
    if out is not None:
        write_results(results, out, machine=machine)
    return INTERRUPTED if is_interrupted else exit_status(results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description="Check the package on a GPU. The exit status is 0 if every stage passed, or none was run "
        "because the machine has no GPU.",
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stage", action="append", choices=names, help="run this stage; may be repeated")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all results to this JSON file")
    parser.add_argument(
        "--device",
        choices=["auto", "cpu"],
        default="auto",
        help="`cpu` runs the stages on tiny models without a GPU, as a check of the checks",
    )
    return parser
