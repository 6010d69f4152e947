"""`agent-loop doctor`: print what this machine has for agent-loop."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.markup import escape

from agent_loop import __version__

QUERY_TIMEOUT_S = 10.0
ENGINES = {"vllm": "vllm", "sglang": "sglang"}
"""Engines with a package of their own: the value of `rollout.engine`, and the package."""
CORE = ("torch", "transformers", "tokenizers", "numpy", "pyarrow")
OPTIONAL = (
    ("ray", "ray", "trainer.runtime: ray"),
    ("peft", "lora", "model.lora_rank"),
    ("starlette", "serve", "agent-loop serve and view, agents on the OpenAI API"),
    ("llguidance", "grammar", "JSON schemas and forced calls on the embedded engine"),
    ("mcp", "mcp", "tools of MCP servers"),
    ("pillow", "vision", "images"),
)
"""Packages that are optional, their extras, and what needs them."""
PROGRAMS = {
    "podman": "workspaces in containers",
    "docker": "workspaces in containers",
    "git": "git workspaces",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report."""

    area: str
    name: str
    found: str
    is_missing: bool = False


def doctor_command(*, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print what this machine has: versions, engines, GPUs, containers and the package's optional parts.

    Nothing is started or loaded. Put the output into a report of a problem.

    Examples:

        agent-loop doctor

        agent-loop doctor --json
    """
    findings = [*_system(), *_packages(), *_devices(), *_programs()]
    if as_json:
        typer.echo(orjson.dumps([asdict(finding) for finding in findings]).decode())
        return
    console, area = Console(), ""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        if finding.area != area:
            area = finding.area
            console.print(f"[bold]{area}[/]")
        style = "dim" if finding.is_missing else "default"
        text = f"  {finding.name.ljust(width)}  {finding.found}"
        console.print(f"[{style}]{escape(text)}[/]", highlight=False, soft_wrap=True)
    console.print("\nWhich sandbox isolates code on this machine: agent-loop check sandbox", highlight=False)


def _system() -> Iterator[Finding]:
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    yield Finding("system", "agent-loop", __version__)
    yield Finding("system", "python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("system", "platform", platform.platform())
    yield Finding("system", "CPU cores", f"{usable}" if usable == cores else f"{usable} of {cores}")


def _packages() -> Iterator[Finding]:
    for name in CORE:
        yield _package("packages", name, needed_by="agent-loop", hint=f"pip install {name}")
    for name, package in ENGINES.items():
        hint = f'pip install "{package}"; see docs/engines.md for the versions'
        yield _package("engines", package, needed_by=f"rollout.engine: {name}", hint=hint)
    for name, extra, use in OPTIONAL:
        yield _package("optional", name, needed_by=use, hint=f'pip install "agent-loop[{extra}]"')


def _package(area: str, name: str, *, needed_by: str, hint: str) -> Finding:
    try:
        return Finding(area, name, version(name))
    except PackageNotFoundError:
        return Finding(area, name, f"not installed ({needed_by}): {hint}", is_missing=True)


def _devices() -> Iterator[Finding]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        yield Finding("devices", "CUDA_VISIBLE_DEVICES", repr(given))
    found = _output(
        ["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"]
    )
    if not found:
        yield Finding("devices", "GPU", "none found by nvidia-smi", is_missing=True)
    for line in found:
        index, *rest = [part.strip() for part in line.split(",")]
        yield Finding("devices", f"GPU {index}", ", ".join(rest))


def _programs() -> Iterator[Finding]:
    for name, use in PROGRAMS.items():
        lines = _output([name, "--version"])
        yield Finding("programs", name, lines[0] if lines else f"not found ({use})", is_missing=not lines)


def _output(command: Sequence[str]) -> list[str]:
    """Return the lines that a program prints; none if it does not exist or fails."""
    try:
        printed = subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, errors="replace", timeout=QUERY_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return printed.splitlines()
