"""Memory of each device in a rollout and in an update, and the smallest change of the settings that makes a run fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TypeAlias

from agent_loop.config import Config
from agent_loop.config.placement import IN_PROCESS, TENSOR_PARALLEL_OPTIONS, devices_per_server
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import merge_mappings, parse_override
from agent_loop.planning.devices import Assignment, assign, device_memory_MiB, visible_devices
from agent_loop.planning.sizes import ModelShape, UpdateMemory, itemsize, row_tokens, update_memory

GB = 1e9
PROCESS_BYTES = 1.0 * GB
"""Allowance for the context of CUDA, its libraries and the communication of one process on a GPU."""
ENGINE_BYTES = 2.0 * GB
"""Allowance for the activations and the captured graphs of an engine. An engine that sleeps keeps half of it."""
SHARE_OPTIONS = {"vllm": ("gpu_memory_utilization", 0.9), "sglang": ("mem_fraction_static", 0.85)}
"""Option of an engine for its share of a device's memory, and the default that is assumed."""
SLOTS = 64
"""Default of `max_slots` of the embedded engine."""
DEVICES = re.compile(r"(?:(\d+)x)?(\d+)x(\d+(?:\.\d+)?)(GB|GiB)", re.IGNORECASE)
Change: TypeAlias = tuple[str, ...]
"""Overrides that belong together."""
MAX_CHANGES = 3
LORA_RANK = 32
HIGHER_SHARES = (0.5, 0.7, 0.85, 0.9, 0.92)
"""Shares of the memory for an engine whose KV cache is too small."""


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
    """Return the machine of a description such as `8x80GB` or, with two nodes, `2x8x80GB`."""
    found = DEVICES.fullmatch(text.replace(" ", ""))
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
    """Assign the devices of a machine, and compute what each holds."""
    assignment = assign(config, devices=machine.devices)
    has_gpu = bool(machine.devices) and config.model.device != "cpu"
    update = update_memory(shape, config, on_gpu=has_gpu)
    server = _server_parts(shape, config, capacity=machine.memory if has_gpu else 0.0)
    loads = (
        _device_loads(config, assignment, machine, update, server)
        if has_gpu
        else [_host_load(config, machine, update, server)]
    )
    faults = [
        f"{load.phase} needs {load.total / GB:.1f} GB on {place(load)}, which has {load.capacity / GB:.1f} GB"
        for load in loads
        if load.total > load.capacity
    ]
    size, longest = devices_per_server(config.placement, config.rollout), row_tokens(config)
    row_bytes = shape.kv_bytes_per_token(itemsize(config)) * longest / size
    rows = server["KV cache"] / row_bytes
    if has_gpu and not config.rollout.server_urls and rows < 1:
        faults.append(
            f"the KV cache of a server has {max(0.0, server['KV cache']) / GB:.1f} GB per device, and a row of "
            f"{longest} tokens needs {row_bytes / GB:.1f} GB"
        )
    positions: int | None = getattr(shape.text, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        faults.append(
            f"rollout.prompt_length and rollout.response_length are {longest} tokens together, and the model has "
            f"{positions} positions"
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
    option = _share_option(config)
    if option is not None and capacity:
        free = option[1] * capacity - weights - ENGINE_BYTES
        return {"engine weights": weights, "KV cache": free, "engine": ENGINE_BYTES}
    slots = int(rollout.engine_kwargs.get("max_slots", SLOTS))
    cache = shape.kv_bytes_per_token(itemsize(config)) * row_tokens(config) * slots / size
    return {"engine weights": weights, "KV cache": cache, "engine": ENGINE_BYTES if capacity else 0.0}


def _share_option(config: Config) -> tuple[str, float] | None:
    """Return the name and the value of the engine's option for its share of the memory; None if it has none."""
    option = SHARE_OPTIONS.get(config.rollout.engine)
    if option is None:
        return None
    return option[0], float(config.rollout.engine_kwargs.get(option[0], option[1]))


def _device_loads(
    config: Config,
    assignment: Assignment,
    machine: Machine,
    update: UpdateMemory,
    server: Mapping[str, float],
) -> list[Load]:
    capacity, context = machine.memory, {"process": PROCESS_BYTES}
    in_process = config.rollout.engine in IN_PROCESS
    trainer = assignment.trainer or (machine.devices[: config.trainer.num_processes] if in_process else ())
    shares = assignment.is_colocated or in_process
    asleep = {"sleeping engine": server["engine"] / 2} if assignment.is_colocated and not in_process else {}
    loads: list[Load] = []
    servers = tuple(name for group in assignment.servers or () for name in group)
    if servers and not shares:
        loads.append(Load(servers, "rollout", dict(server), capacity))
    if trainer:
        # Loading counts only if it takes more than the update.
        if update.loading > update.peak:
            loading = {"float32 weights": update.loading, **context, **asleep}
            loads.append(Load(trainer, "load", loading, capacity))
        if shares:
            loads.append(Load(trainer, "rollout", {**server, **update.at_rest, **context}, capacity))
        own = dict(update.at_peak)
        if assignment.reference:
            own.pop("reference", None)
        loads.append(Load(trainer, "update", {**own, **asleep, **context}, capacity))
    if assignment.reference is not None:
        parts = {"reference": update.at_rest.get("reference", 0.0), "logits": update.logits, **context}
        loads.append(Load((assignment.reference,), "update", parts, capacity))
    return loads


def _host_load(config: Config, machine: Machine, update: UpdateMemory, server: Mapping[str, float]) -> Load:
    """Return the load of a machine without GPUs, where all parts share the memory and nothing sleeps."""
    servers = {name: value * config.rollout.num_servers for name, value in server.items() if value}
    processes = {name: value * config.trainer.num_processes for name, value in update.at_peak.items()}
    return Load(("cpu",), "update", {**servers, **processes}, machine.memory)


def place(load: Load) -> str:
    """Return where a load is."""
    return "the machine" if load.devices == ("cpu",) else f"device {','.join(load.devices)}"


def smallest_change(config: Config, shape: ModelShape, *, machine: Machine) -> Change | None:
    """Return the fewest overrides that make a plan fit, or None if up to three do not suffice.

    Changes that cost only time come first, then those that change the training. Within a change, the value nearest to
    the present one is returned.
    """

    def fits(changes: Sequence[Change]) -> bool:
        try:
            changed = apply(config, [override for change in changes for override in change])
            return not make_plan(changed, shape, machine=machine).faults
        except ConfigError:
            return False

    options = [values for values in _options(config, shape, machine) if values]
    for count in range(1, MAX_CHANGES + 1):
        for chosen in combinations(options, count):
            found = [values[-1] for values in chosen]
            if not fits(found):
                continue
            for index, values in enumerate(
                chosen
            ):  # the mildest value of each that still fits with the others
                found[index] = next(v for v in values if fits([*found[:index], v, *found[index + 1 :]]))
            return tuple(override for change in found for override in change)
    return None


def _options(config: Config, shape: ModelShape, machine: Machine) -> Iterator[list[Change]]:
    """Yield for each kind of change its values, mildest first."""
    actor, rollout, row = config.actor, config.rollout, row_tokens(config)
    option = _share_option(config)
    if option is not None and machine.devices:
        name, share = option
        changes = [
            (f"rollout.engine_kwargs.{name}={round(share - 0.05 * step, 2)}",) for step in range(1, 20)
        ]
        plans = [(each, make_plan(apply(config, each), shape, machine=machine)) for each in changes]
        yield [each for each, plan in plans if plan.concurrent_rows >= rollout.num_servers]
        yield [(f"rollout.engine_kwargs.{name}={value}",) for value in HIGHER_SHARES if value > share]
    if not actor.gradient_checkpointing:
        yield [("actor.gradient_checkpointing=true",)]
    budgets = [max(row, actor.max_tokens_per_micro_batch >> shift) for shift in range(1, 8)]
    yield [
        (f"actor.max_tokens_per_micro_batch={budget}",)
        for budget in dict.fromkeys(budgets)
        if budget < actor.max_tokens_per_micro_batch
    ]
    if rollout.engine in TENSOR_PARALLEL_OPTIONS and not rollout.server_urls and machine.devices:
        own = config.placement.tensor_parallel_size or 1
        devices = rollout.num_servers * own
        yield [  # servers over more devices, and fewer of them
            (f"placement.tensor_parallel_size={size}", f"rollout.num_servers={devices // size}")
            for size in (2, 4, 8)
            if size > own and devices % size == 0
        ]
    is_single = config.trainer.num_processes == 1
    if is_single and machine.devices:
        yield [("actor.optimizer_bits=8",)]
        yield [("actor.optimizer_on_host=true",)]
    if config.model.dtype == "float32":
        yield [("model.dtype=bfloat16",)]
    if not config.model.lora_rank:
        yield [(f"model.lora_rank={LORA_RANK}",)]
    shorter = [rollout.response_length >> shift for shift in range(1, 7)]
    yield [(f"rollout.response_length={length}",) for length in shorter if length >= 64]
    if config.model.lora_rank and not config.model.base_bits and is_single:
        yield [("model.base_bits=4",)]


def apply(config: Config, overrides: Sequence[str]) -> Config:
    """Return the configuration with overrides."""
    values = config.model_dump(exclude_unset=True)
    for override in overrides:
        values = merge_mappings(values, parse_override(override))
    return Config.model_validate(values)
