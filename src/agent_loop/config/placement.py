"""Settings of the placement: which devices servers, trainer and reference model take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agent_loop.config.model import ModelConfig
from agent_loop.config.rollout import RolloutConfig
from agent_loop.config.trainer import TrainerConfig
from agent_loop.config.values import Replicas, Section
from agent_loop.errors import ConfigError

Devices = Annotated[int, Field(ge=0, le=10_000)]

TENSOR_PARALLEL_OPTIONS = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}
"""Engines that can use several devices per server, and their own names of the setting."""
IN_PROCESS = ("embedded", "scripted")
"""Engines that run in the process that starts them."""


class SplitConfig(Section):
    """Separate devices for each part. A part with 0 devices runs on the CPU."""

    servers: Devices = 0
    """Devices of all servers together: `rollout.num_servers` times `tensor_parallel_size`."""
    trainer: Devices = 0
    """Devices of the trainer, one for each of `trainer.num_processes`."""
    reference: Annotated[int, Field(ge=0, le=1)] = 0
    """1 gives the reference model a device of its own, if there is a single training process; 0 loads it where
    `reference` says."""


class PlacementConfig(Section):
    """Devices of the parts of a run. Without settings, the servers take the first devices of the machine and
    the trainer the devices after them. `agent-loop plan` prints the result and the memory of each device."""

    colocated: Replicas | Literal["all"] | None = None
    """Number of devices that servers and trainer share, or `all`; `placement: colocated` is short for `all`."""
    split: SplitConfig | None = None
    """Separate devices: `{servers: 6, trainer: 2}`."""
    tensor_parallel_size: Replicas | None = None
    """Devices of each server. None is the engine's own setting in `rollout.engine_kwargs`, or 1."""
    reference: Literal["trainer", "cpu"] = "trainer"
    """Device of the reference model. The CPU is slow and needs a single training process."""

    @model_validator(mode="before")
    @classmethod
    def _from_one_word(cls, values: Any) -> Any:
        return {"colocated": "all"} if values == "colocated" else values

    @model_validator(mode="after")
    def _has_one_layout(self) -> PlacementConfig:
        if self.colocated is not None and self.split is not None:
            raise ConfigError("placement.colocated and placement.split are both set; unset one of them")
        return self

    @property
    def is_set(self) -> bool:
        """Whether the configuration names a layout."""
        return self.colocated is not None or self.split is not None


def devices_per_server(placement: PlacementConfig, rollout: RolloutConfig) -> int:
    """Return the number of devices of each server."""
    option = TENSOR_PARALLEL_OPTIONS.get(rollout.engine)
    size = placement.tensor_parallel_size
    if option is None:
        if (size or 1) > 1:
            raise ConfigError(
                f"placement.tensor_parallel_size is {size}, but a server of rollout.engine={rollout.engine} uses one "
                "device; set it to 1, or set rollout.engine=vllm"
            )
        return 1
    own = rollout.engine_kwargs.get(option)
    if size is not None and own not in (None, size):
        raise ConfigError(
            f"placement.tensor_parallel_size is {size}, but rollout.engine_kwargs.{option} is {own!r}; unset "
            f"rollout.engine_kwargs.{option}"
        )
    return size or int(own or 1)


def check_placement(
    placement: PlacementConfig, *, model: ModelConfig, rollout: RolloutConfig, trainer: TrainerConfig
) -> None:
    """Refuse a placement that contradicts the rest of the configuration, whatever the machine."""
    per_server, split = devices_per_server(placement, rollout), placement.split
    faults: list[str] = []
    if placement.is_set and model.device == "cpu":
        faults.append("model.device is 'cpu'; unset placement, or set model.device=auto")
    if placement.colocated is not None:
        faults += _colocated_faults(placement.colocated, per_server, rollout=rollout, trainer=trainer)
    if split is not None:
        faults += _split_faults(split, per_server, rollout=rollout, trainer=trainer)
    is_apart = placement.is_set and (placement.reference == "cpu" or (split is not None and split.reference))
    if is_apart and trainer.num_processes > 1:
        faults.append(
            f"the reference model is apart from the trainer, whose {trainer.num_processes} processes shard it; set "
            "placement.reference=trainer and placement.split.reference=0, or trainer.num_processes=1"
        )
    if faults:
        what = "colocated" if placement.colocated is not None else "set"
        raise ConfigError(f"placement is {what}, but {faults[0]}")


def _colocated_faults(
    given: int | Literal["all"], per_server: int, *, rollout: RolloutConfig, trainer: TrainerConfig
) -> Iterator[str]:
    if trainer.mode == "async" and trainer.max_staleness:
        yield (
            "trainer.mode is 'async', in which servers and trainer work at the same time; set trainer.mode=sync, or "
            "placement.split"
        )
    if rollout.server_urls:
        yield "rollout.server_urls names servers that run elsewhere; set placement.split.trainer alone"
    if not rollout.free_cache_engine:
        yield (
            "rollout.free_cache_engine is false, so the servers never sleep; set rollout.free_cache_engine=true"
        )
    servers = 1 if rollout.engine in IN_PROCESS else rollout.num_servers * per_server
    devices = trainer.num_processes if given == "all" else given
    if servers != devices or trainer.num_processes != devices:
        remedy = f"choose a multiple of {per_server}, or placement.tensor_parallel_size=1"
        if devices % per_server == 0:
            remedy = f"set rollout.num_servers={devices // per_server} and trainer.num_processes={devices}"
        yield (
            f"for placement.colocated={given} the servers take {servers} devices (rollout.num_servers="
            f"{rollout.num_servers}, {per_server} each) and the trainer {trainer.num_processes} "
            f"(trainer.num_processes); {remedy}"
        )


def _split_faults(
    split: SplitConfig, per_server: int, *, rollout: RolloutConfig, trainer: TrainerConfig
) -> Iterator[str]:
    if split.trainer and split.trainer != trainer.num_processes:
        yield (
            f"placement.split.trainer is {split.trainer} and trainer.num_processes is {trainer.num_processes}; set "
            f"trainer.num_processes={split.trainer}"
        )
    if rollout.server_urls and split.servers:
        yield "rollout.server_urls names servers that run elsewhere; set placement.split.servers=0"
    if rollout.engine in IN_PROCESS and (split.servers or split.trainer):
        yield (
            f"rollout.engine={rollout.engine} runs in the trainer's process; set rollout.engine=embedded_process or "
            "vllm, or placement=colocated"
        )
    needed = rollout.num_servers * per_server
    if split.servers and split.servers != needed:
        remedy = f"set placement.split.servers={needed}"
        if split.servers % per_server == 0:
            remedy = f"set rollout.num_servers={split.servers // per_server}"
        yield (
            f"placement.split.servers is {split.servers}, and rollout.num_servers={rollout.num_servers} with "
            f"{per_server} devices each take {needed}; {remedy}"
        )
