"""Devices of servers and training processes on a Ray cluster."""

from __future__ import annotations

from typing import Any

import pytest

from agent_loop.config import Config, parse_section
from agent_loop.distributed.device_group import bundles_of, gpus_per_learner, gpus_per_server
from agent_loop.errors import ConfigError


def settings(placement: Any = None, *, servers: int = 1, processes: int = 1, **more: Any) -> Config:
    values: dict[str, Any] = {
        "rollout": {"engine": "vllm", "num_servers": servers},
        "trainer": {"runtime": "ray", "num_processes": processes},
        **more,
    }
    return parse_section(
        Config, values if placement is None else {**values, "placement": placement}, where="test"
    )


def test_a_server_reserves_what_its_engine_needs() -> None:
    assert gpus_per_server(settings(), has_gpus=True) == 1
    assert gpus_per_server(settings(), has_gpus=False) == 0
    assert gpus_per_server(settings(model={"device": "cpu"}), has_gpus=True) == 0
    assert gpus_per_server(settings(rollout={"engine": "scripted"}), has_gpus=True) == 0
    assert gpus_per_server(settings({"tensor_parallel_size": 4}), has_gpus=True) == 4
    own = settings(trainer={"ray": {"num_gpus_per_server": 0.25, "num_gpus_per_learner": 0}})
    assert gpus_per_server(own, has_gpus=True) == 0.25
    assert (gpus_per_learner(settings(), has_gpus=True), gpus_per_learner(own, has_gpus=True)) == (1, 0)


def test_a_split_has_a_bundle_for_each_server_and_each_training_process() -> None:
    config = settings(
        {"split": {"servers": 4, "trainer": 2}, "tensor_parallel_size": 2}, servers=2, processes=2
    )
    assert bundles_of(config, driver_ip="10.0.0.1") == [
        {"CPU": 1, "GPU": 2},
        {"CPU": 1, "GPU": 2},
        {"CPU": 1, "GPU": 1, "node:10.0.0.1": 0.001},
        {"CPU": 1, "GPU": 1},
    ]


def test_colocated_parts_share_a_bundle_of_one_device() -> None:
    config = settings({"colocated": 2}, servers=2, processes=2)
    assert bundles_of(config, driver_ip="a") == [{"CPU": 2, "GPU": 1, "node:a": 0.001}, {"CPU": 2, "GPU": 1}]
    wide = settings({"colocated": 2, "tensor_parallel_size": 2}, servers=1, processes=2)
    with pytest.raises(ConfigError, match=r"set placement\.tensor_parallel_size=1, or placement\.split"):
        bundles_of(wide, driver_ip="a")


def test_the_process_of_the_trainer_sees_the_device_of_the_reference_model_too() -> None:
    config = settings({"split": {"servers": 1, "trainer": 1, "reference": 1}})
    assert [bundle["GPU"] for bundle in bundles_of(config, driver_ip="10.0.0.1")] == [1, 2]
