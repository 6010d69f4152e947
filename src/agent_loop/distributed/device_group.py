"""Ray placement group of a run: the devices that `placement` gives to servers and training processes."""

from __future__ import annotations

import os
from typing import Any

from agent_loop.config import Config
from agent_loop.config.placement import devices_per_server
from agent_loop.errors import ConfigError
from agent_loop.planning.devices import VISIBLE

GROUP_NAME = "agent-loop-devices"
"""Name of the group in the namespace of the driver's job, by which the training processes find it."""
READY_TIMEOUT_S = 60.0
SHARE = 0.5
"""Part of a device that a server and a training process reserve if they share it."""


def gpus_per_server(config: Config, *, has_gpus: bool) -> float:
    """Return the GPUs that Ray reserves for a server: those of the settings, or else what the engine needs."""
    given = config.trainer.ray.num_gpus_per_server
    if given is not None:
        return given
    rollout, split = config.rollout, config.placement.split
    is_on_cpu = rollout.engine == "scripted" or bool(rollout.server_urls) or (split and not split.servers)
    if is_on_cpu or config.model.device == "cpu" or not has_gpus:
        return 0.0
    return SHARE if config.placement.colocated is not None else devices_per_server(config.placement, rollout)


def gpus_per_learner(config: Config, *, has_gpus: bool) -> float:
    """Return the GPUs that Ray reserves for a training process, with that of a reference model of its own."""
    given, split = config.trainer.ray.num_gpus_per_learner, config.placement.split
    if given is not None:
        return given
    if config.model.device == "cpu" or not has_gpus or (split is not None and not split.trainer):
        return 0.0
    own = SHARE if config.placement.colocated is not None else 1.0
    return own + (split.reference if split is not None else 0)


def bundles_of(config: Config, *, driver_ip: str) -> list[dict[str, float]]:
    """Return the resources of each bundle: one per server and one per training process, or shared ones.

    The bundle of the first training process is on the driver's node.
    """
    ray, per_server = config.trainer.ray, devices_per_server(config.placement, config.rollout)
    processes, servers = config.trainer.num_processes, config.rollout.num_servers
    for_server = {"CPU": ray.num_cpus_per_server, "GPU": gpus_per_server(config, has_gpus=True)}
    for_learner = {"CPU": ray.num_cpus_per_learner, "GPU": gpus_per_learner(config, has_gpus=True)}
    if config.placement.colocated is not None:
        if per_server > 1:
            raise ConfigError(
                f"placement is colocated on Ray with {per_server} devices per server; set "
                "placement.tensor_parallel_size=1, or placement.split"
            )
        bundles = [
            {name: for_server[name] + for_learner[name] for name in for_server} for _ in range(servers)
        ]
    else:
        bundles = [dict(for_server) for _ in range(servers)] + [dict(for_learner) for _ in range(processes)]
    bundles[first_learner_bundle(config)][f"node:{driver_ip}"] = 0.001
    return [{name: value for name, value in bundle.items() if value} for bundle in bundles]


def first_learner_bundle(config: Config) -> int:
    """Return the index of the bundle of the first training process."""
    return 0 if config.placement.colocated is not None else config.rollout.num_servers


def create_group(ray: Any, config: Config) -> None:
    """Reserve the devices of a run, and show the driver the device of the first training process alone."""
    bundles = bundles_of(config, driver_ip=ray.util.get_node_ip_address())
    group = ray.util.placement_group(bundles, strategy="PACK", name=GROUP_NAME)
    if not group.wait(READY_TIMEOUT_S):
        ray.util.remove_placement_group(group)
        raise ConfigError(
            f"placement takes {sum(bundle.get('GPU', 0) for bundle in bundles):g} GPUs, and the Ray cluster has "
            f"{ray.cluster_resources().get('GPU', 0):g}, or too few of them free or on the driver's node; lower the "
            "number, or add nodes"
        )
    share = gpus_per_learner(config, has_gpus=True)
    if share:
        holder_class = ray.remote(num_cpus=0, num_gpus=share)(DeviceHolder)
        holder = holder_class.options(
            name=f"{GROUP_NAME}-driver",
            scheduling_strategy=strategy_for(ray, bundle=first_learner_bundle(config)),
        ).remote()
        os.environ[VISIBLE] = ray.get(holder.devices.remote())
        _holders.append(holder)


def strategy_for(ray: Any, *, bundle: int) -> Any:
    """Return the scheduling strategy of an actor in a bundle of the run's group."""
    strategies: Any = ray.util.scheduling_strategies
    return strategies.PlacementGroupSchedulingStrategy(
        placement_group=ray.util.get_placement_group(GROUP_NAME), placement_group_bundle_index=bundle
    )


def remove_group(ray: Any) -> None:
    """Free the devices."""
    _holders.clear()
    ray.util.remove_placement_group(ray.util.get_placement_group(GROUP_NAME))


class DeviceHolder:
    """Actor that reserves the device of the driver, which is not an actor itself."""

    def devices(self) -> str:
        """Return the devices that Ray gave to this actor."""
        return os.environ.get(VISIBLE, "")


_holders: list[Any] = []
"""References that keep the actors alive."""
