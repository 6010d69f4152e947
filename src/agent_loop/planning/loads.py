"""Memory of each device during a rollout and during an update."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agent_loop.config import Config
from agent_loop.config.placement import IN_PROCESS, TENSOR_PARALLEL_OPTIONS, devices_per_server
from agent_loop.errors import ConfigError
from agent_loop.planning.assignment import Assignment, assign
from agent_loop.planning.machine import device_memory_MiB, visible_devices
from agent_loop.planning.memory import UpdateMemory, itemsize, row_tokens, update_memory
from agent_loop.planning.shapes import ModelShape

GB = 1e9
PROCESS_BYTES = 1.0 * GB
"""Allowance for the context of CUDA, its libraries and the communication of one process on a GPU."""
ENGINE_BYTES = 2.0 * GB
"""Allowance for the activations and the captured graphs of an engine. An engine that sleeps keeps half of it."""
SHARE_OPTIONS = {"vllm": ("gpu_memory_utilization", 0.9), "sglang": ("mem_fraction_static", 0.85)}
"""Option of an engine for its share of a device's memory, and the default that is assumed."""
SLOTS = 64
"""Default of `max_slots` of the embedded engine."""
_DEVICES = re.compile(r"(?:(\d+)x)?(\d+)x(\d+(?:\.\d+)?)(GB|GiB)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices of one or several nodes."""

    devices: tuple[str, ...]
    """Names of the devices; with several nodes, `node:index`. Empty for a machine without GPUs."""
    memory: float
    """Bytes of each device, or of the whole machine without GPUs."""
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """Memory of devices that hold the same parts, in one phase."""

    devices: tuple[str, ...]
    phase: str
    parts: Mapping[str, float]
    """Bytes by what takes them."""
    capacity: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


@dataclass(frozen=True, slots=True)
class Plan:
    """Assignment of the parts of a run to devices, and their memory."""

    assignment: Assignment
    loads: tuple[Load, ...]
    faults: tuple[str, ...]
    """Reasons why the run does not fit, one line each."""
    concurrent_rows: float
    """Rows of full length that the KV caches of all servers hold."""
    host_bytes: float
    """Memory of the host of a node while the trainer loads: each process loads the whole model in float32."""


def parse_devices(text: str) -> Machine:
    """Return the machine of a description such as `8x80GB` or, with two nodes, `2x8x80GB`.

    Raises:
        ConfigError: The description has another form.
    """
    found = _DEVICES.fullmatch(text.replace(" ", ""))
    if found is None:
        raise ConfigError(f"--devices is {text!r}; give it as 8x80GB, or with two nodes as 2x8x80GB")
    nodes, count = int(found[1] or 1), int(found[2])
    unit = GB if found[4].upper() == "GB" else 2**30
    names = [
        f"{node}:{index}" if nodes > 1 else str(index) for node in range(nodes) for index in range(count)
    ]
    return Machine(tuple(names), float(found[3]) * unit, nodes)


def this_machine() -> Machine:
    """Return the devices of this machine; without any, its memory."""
    devices = tuple(visible_devices())
    memory = device_memory_MiB()
    if devices and memory:
        return Machine(devices, min(memory) * 2**20)
    if devices:
        raise ConfigError(
            "the memory of the devices is not known, without nvidia-smi; give --devices, as in 8x80GB"
        )
    lines = Path("/proc/meminfo").read_text().splitlines()
    return Machine((), next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")))


def make_plan(config: Config, shape: ModelShape, *, machine: Machine) -> Plan:
    """Assign the devices of a machine, and compute what each holds.

    Raises:
        ConfigError: The devices do not suffice for the placement.
    """
    assignment = assign(config, devices=machine.devices)
    has_gpu = bool(machine.devices) and config.model.device != "cpu"
    update = update_memory(shape, config, on_gpu=has_gpu)
    if has_gpu and config.placement.reference == "cpu":
        update = replace(update, reference=0.0)
    server = _server_parts(shape, config, capacity=machine.memory if has_gpu else 0.0)
    loads = _device_loads(config, assignment, machine, update, server) if has_gpu else ()
    if not has_gpu:
        loads = (_host_load(config, machine, update, server),)
    faults = [
        f"{load.phase} needs {load.total / GB:.1f} GB on {_named(load.devices)}, which has {load.capacity / GB:.1f} GB"
        for load in loads
        if not load.fits
    ]
    size = devices_per_server(config.placement, config.rollout)
    row_bytes = shape.kv_bytes_per_token(itemsize(config)) * row_tokens(config) / size
    rows = server["KV cache"] / row_bytes
    if has_gpu and not config.rollout.server_urls and rows < 1:
        faults.append(
            f"the KV cache of a server has {max(0.0, server['KV cache']) / GB:.1f} GB per device, and a row of "
            f"{row_tokens(config)} tokens needs {row_bytes / GB:.1f} GB"
        )
    if shape.max_positions is not None and row_tokens(config) > shape.max_positions:
        faults.append(
            f"rollout.prompt_length and rollout.response_length are {row_tokens(config)} tokens together, and the "
            f"model has {shape.max_positions} positions"
        )
    return Plan(
        assignment=assignment,
        loads=tuple(loads),
        faults=tuple(faults),
        concurrent_rows=max(0.0, rows) * config.rollout.num_servers,
        host_bytes=4.0 * shape.parameters * config.trainer.num_processes / machine.nodes,
    )


def _server_parts(shape: ModelShape, config: Config, *, capacity: float) -> dict[str, float]:
    """Return what a server holds on each of its devices."""
    rollout, size = config.rollout, devices_per_server(config.placement, config.rollout)
    if rollout.server_urls or rollout.engine == "scripted":
        return {"engine weights": 0.0, "KV cache": 0.0, "engine": 0.0}
    weights = shape.parameters * itemsize(config) / size
    option = SHARE_OPTIONS.get(rollout.engine)
    if option is not None and capacity:
        share = float(rollout.engine_kwargs.get(option[0], option[1])) * capacity
        return {"engine weights": weights, "KV cache": share - weights - ENGINE_BYTES, "engine": ENGINE_BYTES}
    slots = int(rollout.engine_kwargs.get("max_slots", SLOTS))
    cache = shape.kv_bytes_per_token(itemsize(config)) * row_tokens(config) * slots / size
    return {"engine weights": weights, "KV cache": cache, "engine": ENGINE_BYTES if capacity else 0.0}


def _trainer_parts(update: UpdateMemory, *, is_peak: bool) -> dict[str, float]:
    """Return what a training process holds, at rest or at the peak of an update."""
    parts = {"weights": update.weights, "optimizer": update.optimizer, "reference": update.reference}
    if is_peak:
        parts |= {"gradients": update.gradients}
        if update.step > update.activations + update.logits + update.working:
            parts |= {"optimizer step": update.step}
        else:
            parts |= {"activations": update.activations, "logits": update.logits, "working": update.working}
    return {name: value for name, value in parts.items() if value}


def _device_loads(
    config: Config,
    assignment: Assignment,
    machine: Machine,
    update: UpdateMemory,
    server: Mapping[str, float],
) -> list[Load]:
    capacity, context = machine.memory, {"process": PROCESS_BYTES}
    loading = {"float32 weights": update.loading, **context}
    peak, resting = _trainer_parts(update, is_peak=True), _trainer_parts(update, is_peak=False)
    in_process = config.rollout.engine in IN_PROCESS
    trainer = assignment.trainer or (machine.devices[: config.trainer.num_processes] if in_process else ())
    if assignment.is_colocated or in_process:
        asleep = {"sleeping engine": server["engine"] / 2} if not in_process else {}
        return [
            *_loads_if(update, trainer, {**loading, **asleep}, capacity),
            Load(trainer, "rollout", {**server, **resting, **context}, capacity),
            Load(trainer, "update", {**peak, **asleep, **context}, capacity),
        ]
    loads: list[Load] = []
    servers = tuple(name for group in assignment.servers or () for name in group)
    if servers:
        loads.append(Load(servers, "rollout", dict(server), capacity))
    if trainer:
        loads += _loads_if(update, trainer, loading, capacity)
        of_rank = (
            peak if assignment.reference is None else {k: v for k, v in peak.items() if k != "reference"}
        )
        loads.append(Load(trainer, "update", {**of_rank, **context}, capacity))
    if assignment.reference is not None:
        parts = {"reference": update.reference, "logits": update.logits, **context}
        loads.append(Load((assignment.reference,), "update", parts, capacity))
    return loads


def _loads_if(
    update: UpdateMemory, trainer: tuple[str, ...], parts: Mapping[str, float], capacity: float
) -> list[Load]:
    """Return the load while the model is loaded, if it is higher than that of an update."""
    return [Load(trainer, "load", parts, capacity)] if update.loading > update.peak else []


def _host_load(config: Config, machine: Machine, update: UpdateMemory, server: Mapping[str, float]) -> Load:
    """Return the load of a machine without GPUs, where all parts share the memory and nothing sleeps."""
    servers = {name: value * config.rollout.num_servers for name, value in server.items() if value}
    trainer = _trainer_parts(update, is_peak=True)
    processes = {name: value * config.trainer.num_processes for name, value in trainer.items()}
    return Load(("cpu",), "update", {**servers, **processes}, machine.memory)


def _named(devices: Sequence[str]) -> str:
    return "the machine" if devices == ("cpu",) else f"device {device_range(devices)}"


def device_range(devices: Sequence[str]) -> str:
    """Return names of devices, with `0-5` for a run of numbers."""
    if len(devices) > 2 and all(name.rpartition(":")[2].isdigit() for name in devices):
        nodes = dict.fromkeys(name.rpartition(":")[0] for name in devices)
        parts: list[str] = []
        for node in nodes:
            numbers = [int(name.rpartition(":")[2]) for name in devices if name.rpartition(":")[0] == node]
            if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
                return ",".join(devices)
            parts.append(f"{node}:{numbers[0]}-{numbers[-1]}" if node else f"{numbers[0]}-{numbers[-1]}")
        return ",".join(parts)
    return ",".join(devices)


def share_option(config: Config) -> tuple[str, float] | None:
    """Return the name and the value of the engine's option for its share of the memory; None if it has none."""
    option = SHARE_OPTIONS.get(config.rollout.engine)
    if option is None:
        return None
    return option[0], float(config.rollout.engine_kwargs.get(option[0], option[1]))


def can_split_models(config: Config) -> bool:
    """Return whether a server can use several devices."""
    return config.rollout.engine in TENSOR_PARALLEL_OPTIONS and not config.rollout.server_urls
