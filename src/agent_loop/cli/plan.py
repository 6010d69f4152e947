"""`agent-loop plan`: where the parts of a run go, and whether they fit."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from agent_loop.cli.arguments import ConfigArgument, OverridesArgument, read_config
from agent_loop.cli.verbosity import print_line
from agent_loop.config import Config
from agent_loop.planning.fit import (
    GB,
    Machine,
    Plan,
    make_plan,
    parse_devices,
    place,
    smallest_change,
    this_machine,
)
from agent_loop.planning.sizes import ModelShape, read_shape

EXIT_DOES_NOT_FIT = 1


def plan_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Devices to plan for, such as `8x80GB`, or `2x8x80GB` for two nodes.",
            show_default="those of this machine",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A `config.json`, or a folder with one.", show_default="that of `model.path`"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Print which device each part of a run takes, and the memory of each, without loading the model.

    If something does not fit, the smallest change of the settings that makes it fit is printed, and the exit code is 1.
    The memory is computed for rows of full length. Allowances for CUDA and the engine are included.

    Examples:

        agent-loop plan config.yaml

        agent-loop plan config.yaml --devices 8x80GB model.lora_rank=32

        agent-loop plan config.yaml --devices 1x24GB --model models/qwen3-4b/config.json
    """
    settings = read_config(config, overrides)
    shape = read_shape(model or settings.model.path)
    machine = parse_devices(devices) if devices is not None else this_machine()
    found = make_plan(settings, shape, machine=machine)
    change = smallest_change(settings, shape, machine=machine) if found.faults else None
    if as_json:
        values = _as_json(found, settings, shape, change=change)
        typer.echo(json.dumps(values, indent=2))
    else:
        _print(found, settings, shape, machine, change=change)
    if found.faults:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _print(
    plan: Plan,
    config: Config,
    shape: ModelShape,
    machine: Machine,
    *,
    change: tuple[str, ...] | None,
) -> None:
    console = Console(highlight=False, soft_wrap=True)
    print_line(
        console,
        f"{shape.model.config.model_type}, {shape.parameters / GB:.2f} billion parameters, {config.model.dtype}",
    )
    parts = Table("part", "device")
    for name, where in _places(plan, config).items():
        parts.add_row(name, where)
    console.print(parts)
    memory = Table("where", "phase", "GB each", "what")
    for load in plan.loads:
        for name, value in load.parts.items():
            memory.add_row(place(load), load.phase, f"{value / GB:.2f}", name)
        memory.add_row("", "", f"{load.total / GB:.2f}", f"of {load.capacity / GB:.2f}", end_section=True)
    console.print(memory)
    for line in _notes(plan, config, machine):
        print_line(console, line)
    for fault in plan.faults:
        print_line(console, f"does not fit: {fault}", style="bold red")
    if plan.faults:
        remedy = (
            "set " + " ".join(change)
            if change
            else "no change of up to three settings makes it fit; use more devices"
        )
        print_line(console, f"smallest change: {remedy}")
    else:
        console.print("it fits", style="bold")


def _places(plan: Plan, config: Config) -> dict[str, str]:
    """Return the devices of each part, as `CUDA_VISIBLE_DEVICES` of its processes."""
    found, places = plan.assignment, dict[str, str]()
    for index, devices in enumerate(found.servers or ()):
        places[f"server {index}"] = ",".join(devices) or "cpu"
    for rank in range(config.trainer.num_processes if found.trainer is not None else 0):
        places[f"trainer process {rank}"] = ",".join(found.of_rank(rank) or ()) or "cpu"
    if found.reference is not None:
        places["reference model"] = found.reference
    if config.rollout.server_urls:
        places["servers"] = "elsewhere (rollout.server_urls)"
    return places or {"servers and trainer": "as the process that starts them"}


def _notes(plan: Plan, config: Config, machine: Machine) -> list[str]:
    """Return lines about concurrency, host memory and tokens."""
    rollout, steps = config.rollout, config.trainer.total_steps
    rows = config.data.train_batch_size * rollout.n
    sampled = rows * rollout.response_length
    trained = rows * (rollout.prompt_length + rollout.response_length)
    lines = [
        f"KV caches hold {plan.concurrent_rows:.0f} rows of full length at once; a step has {rows}",
        f"{steps} steps, at most {sampled * steps / 1e6:.1f} million sampled and {trained * steps / 1e6:.1f} million "
        "trained tokens",
    ]
    if machine.devices:
        lines.append(f"loading takes {plan.host_bytes / GB:.0f} GB of host memory per node")
    return lines


def _as_json(
    plan: Plan, config: Config, shape: ModelShape, *, change: tuple[str, ...] | None
) -> dict[str, Any]:
    return {
        "parameters": shape.parameters,
        "places": _places(plan, config),
        "loads": [
            {
                "devices": list(load.devices),
                "phase": load.phase,
                "bytes": dict(load.parts),
                "total": load.total,
                "capacity": load.capacity,
            }
            for load in plan.loads
        ],
        "faults": list(plan.faults),
        "smallest_change": list(change) if change else None,
        "concurrent_rows": plan.concurrent_rows,
    }
