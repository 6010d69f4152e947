"""Settings of the trainer, of Ray, and of the devices that servers, trainer and reference model take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agent_loop.config.rollout import RolloutConfig
from agent_loop.config.task import ModelConfig
from agent_loop.config.values import (
    Coefficient,
    Logger,
    NotNegative,
    Positive,
    PositiveSeconds,
    Replicas,
    Section,
    Seed,
)
from agent_loop.errors import ConfigError


class RayConfig(Section):
    """Ray cluster of `trainer.runtime: ray`."""

    address: str | None = None
    """Address of a running cluster, such as `auto` or `10.0.0.1:6379`; None starts one for the run."""
    host: str | None = None
    """Address at which other machines reach a cluster that is started here. None listens on loopback only."""
    num_cpus_per_worker: Coefficient = 1.0
    """CPUs of each of `rollout.agent.num_workers`."""
    num_cpus_per_server: Coefficient = 1.0
    num_gpus_per_server: Coefficient | None = None
    """GPUs of each server. None is what the engine needs, or 0 in a cluster without GPUs."""
    num_cpus_per_learner: Coefficient = 1.0
    """CPUs of each training process but the first, which is the driver."""
    num_gpus_per_learner: Coefficient | None = None
    """GPUs of each training process but the first. None is 1 if training is on GPUs."""
    runtime_env: dict[str, Any] = {}
    """Runtime environment of Ray: working directory, environment variables, packages."""
    restart_timeout_s: PositiveSeconds = 300.0
    """Seconds that a batch without a living worker waits for a worker to restart."""
    max_row_restarts: Positive = 5
    """How often a row is run again when its worker dies."""


class TrainerConfig(Section):
    """Steps, folders, loggers, checkpoints and processes of a training."""

    total_steps: Positive = 100
    """Steps of the training."""
    total_epochs: Positive | None = None
    """Passes over the training rows, if `total_steps` is not given."""
    run_dir: Annotated[str, Field(min_length=1)] = "runs/train"
    """Folder of metrics, checkpoints and trajectories."""
    project_name: str = "agent_loop"
    """Project of the run in loggers and traces."""
    experiment_name: str = ""
    """Name of the run in loggers and traces; empty is the name of `run_dir`."""
    logger: Logger | list[Logger] = []
    """Loggers besides `metrics.jsonl` and the console: `mlflow`, `tensorboard`, `wandb`, or a list of them."""
    val_every: Positive | None = None
    """Steps between evaluations. The last step is always evaluated; None never evaluates."""
    val_before_train: bool = False
    save_every: Positive | None = 20
    """Steps between checkpoints. The last step always has one."""
    keep_checkpoints: Positive = 2
    keep_trajectories: NotNegative | None = None
    """Number of the newest steps whose trajectories stay in `run_dir/trajectories`; 0 keeps none, None keeps all."""
    max_dead_steps: Positive | None = 10
    """Consecutive steps without a usable signal after which the run is saved and stops; None never stops it."""
    num_threads: Replicas = 1
    """Threads for training on a CPU, in each process."""
    num_processes: Replicas = 1
    """Training processes, each with a shard of the models. Keep 1 if `torchrun` starts the processes."""
    seed: Seed = 0
    mode: Literal["sync", "async"] = "sync"
    """`sync` alternates rollout and update. `async` runs the rollouts of the next steps during an update."""
    max_staleness: NotNegative = 1
    """With `mode: async`, the maximum age of a trained token in weight versions, and the number of steps whose rollouts
    run ahead."""
    runtime: Literal["local", "ray"] = "local"
    """Run servers, agent loops and further training processes on this machine, or on a Ray cluster."""
    ray: RayConfig = RayConfig()
    """Settings of `runtime: ray`."""


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
