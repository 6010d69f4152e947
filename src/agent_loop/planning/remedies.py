"""The smallest change of the settings that makes a run fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TypeAlias

from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import merge_mappings, parse_override
from agent_loop.planning.loads import Machine, can_split_models, make_plan, share_option
from agent_loop.planning.memory import row_tokens
from agent_loop.planning.shapes import ModelShape

Change: TypeAlias = tuple[str, ...]
"""Overrides that belong together."""
MAX_CHANGES = 3
LORA_RANK = 32
LOWEST_SHARE = 0.15
HIGHER_SHARES = (0.5, 0.7, 0.85, 0.9, 0.92)
"""Shares of the memory for an engine whose KV cache is too small."""


def smallest_change(config: Config, shape: ModelShape, *, machine: Machine) -> Change | None:
    """Return the fewest overrides that make a plan fit, or None if up to three do not suffice.

    Changes that cost only time come first, then those that change the training. Within a change, the value nearest to
    the present one is returned.
    """
    options = [values for values in _options(config, shape, machine) if values]
    for count in range(1, MAX_CHANGES + 1):
        for chosen in combinations(options, count):
            if _fits(config, shape, machine, [values[-1] for values in chosen]):
                return _mildest(config, shape, machine, chosen)
    return None


def _mildest(
    config: Config, shape: ModelShape, machine: Machine, chosen: Sequence[Sequence[Change]]
) -> Change:
    """Return the mildest value of each change that still fits with the others."""
    found = [values[-1] for values in chosen]
    for index, values in enumerate(chosen):
        for value in values:
            if _fits(config, shape, machine, [*found[:index], value, *found[index + 1 :]]):
                found[index] = value
                break
    return tuple(override for change in found for override in change)


def _options(config: Config, shape: ModelShape, machine: Machine) -> Iterator[list[Change]]:
    """Yield for each kind of change its values, mildest first."""
    actor, rollout, row = config.actor, config.rollout, row_tokens(config)
    option = share_option(config)
    if option is not None and machine.devices:
        name, share = option
        key, count = f"rollout.engine_kwargs.{name}", config.rollout.num_servers
        lower = [round(share - 0.05 * step, 2) for step in range(1, 20)]
        changes = [(f"{key}={value}",) for value in lower if value >= LOWEST_SHARE]
        yield [each for each in changes if _rows(config, shape, machine, each) >= count]
        yield [(f"{key}={value}",) for value in HIGHER_SHARES if value > share]
    if not actor.gradient_checkpointing:
        yield [("actor.gradient_checkpointing=true",)]
    halves = [actor.max_tokens_per_micro_batch >> shift for shift in range(1, 8)]
    budgets = [budget for budget in halves if budget > row] + (
        [row] if row < actor.max_tokens_per_micro_batch else []
    )
    yield [(f"actor.max_tokens_per_micro_batch={budget}",) for budget in budgets]
    yield list(_wider_servers(config, machine))
    if config.trainer.num_processes == 1 and machine.devices:
        if actor.optimizer_bits == 32:
            yield [("actor.optimizer_bits=8",)]
        if not actor.optimizer_on_host:
            yield [("actor.optimizer_on_host=true",)]
    if config.model.dtype == "float32":
        yield [("model.dtype=bfloat16",)]
    if not config.model.lora_rank:
        yield [(f"model.lora_rank={LORA_RANK}",)]
    shorter = [rollout.response_length >> shift for shift in range(1, 7)]
    yield [(f"rollout.response_length={length}",) for length in shorter if length >= 64]
    if config.model.lora_rank and not config.model.base_bits and config.trainer.num_processes == 1:
        yield [("model.base_bits=4",)]


def _wider_servers(config: Config, machine: Machine) -> Iterator[Change]:
    """Yield servers that split the model over more devices, with fewer servers on the same devices."""
    if not can_split_models(config) or not machine.devices:
        return
    own = config.placement.tensor_parallel_size or 1
    devices = config.rollout.num_servers * own
    for size in (2, 4, 8):
        if size > own and devices % size == 0:
            yield f"placement.tensor_parallel_size={size}", f"rollout.num_servers={devices // size}"


def _fits(config: Config, shape: ModelShape, machine: Machine, changes: Sequence[Change]) -> bool:
    try:
        changed = apply(config, [override for change in changes for override in change])
        return not make_plan(changed, shape, machine=machine).faults
    except ConfigError:
        return False


def _rows(config: Config, shape: ModelShape, machine: Machine, change: Change) -> float:
    """Return the rows that the KV caches hold after a change."""
    return make_plan(apply(config, change), shape, machine=machine).concurrent_rows


def apply(config: Config, overrides: Sequence[str]) -> Config:
    """Return the configuration with overrides.

    Raises:
        ConfigError: The result contradicts itself.
    """
    values = config.model_dump(exclude_unset=True)
    for override in overrides:
        values = merge_mappings(values, parse_override(override))
    return Config.model_validate(values)
