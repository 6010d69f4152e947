"""Settings of the trainer and of Ray."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

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
