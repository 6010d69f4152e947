"""Assignment of devices to servers, trainer and reference model, on one machine and on a Ray cluster."""

from __future__ import annotations

import os
from typing import Any

import pytest

from agent_loop.config import Config, parse_section
from agent_loop.distributed.device_group import bundles_of, gpus_per_learner, gpus_per_server
from agent_loop.errors import ConfigError
from agent_loop.planning.devices import (
    ALL_DEVICES,
    UNASSIGNED,
    VISIBLE,
    Assignment,
    assign,
    environment_for,
    seeing,
    visible_devices,
)
from agent_loop.servers.factory import make_server_specs

EIGHT = [str(index) for index in range(8)]


def settings(
    placement: Any = None, *, engine: str = "vllm", num_servers: int = 1, processes: int = 1, **more: Any
) -> Config:
    values: dict[str, Any] = {
        "rollout": {"engine": engine, "num_servers": num_servers, **more.pop("rollout", {})},
        "trainer": {"num_processes": processes, **more.pop("trainer", {})},
        **more,
    }
    if placement is not None:
        values["placement"] = placement
    return parse_section(Config, values, where="test")


def test_a_machine_without_devices_needs_no_placement() -> None:
    assert assign(settings(num_servers=6), devices=[]) == UNASSIGNED
    assert assign(settings(model={"device": "cpu"}), devices=EIGHT) == UNASSIGNED


def test_servers_take_the_first_devices_and_the_trainer_those_after_them() -> None:
    config = settings({"split": {"servers": 6, "trainer": 2}}, num_servers=6, processes=2)
    found = assign(config, devices=EIGHT)
    assert found.servers == (("0",), ("1",), ("2",), ("3",), ("4",), ("5",))
    assert found.trainer == ("6", "7")
    assert found == assign(settings(num_servers=6, processes=2), devices=EIGHT)


def test_a_server_takes_as_many_devices_as_its_model_is_split_over() -> None:
    config = settings(
        {"split": {"servers": 4, "trainer": 2}, "tensor_parallel_size": 2}, num_servers=2, processes=2
    )
    assert assign(config, devices=EIGHT).servers == (("0", "1"), ("2", "3"))
    own = settings(num_servers=2, rollout={"engine_kwargs": {"tensor_parallel_size": 2}})
    assert assign(own, devices=EIGHT) == Assignment((("0", "1"), ("2", "3")), ("4",))


def test_colocated_parts_take_the_same_devices() -> None:
    config = settings(
        "colocated", num_servers=4, processes=8, rollout={"engine_kwargs": {"tensor_parallel_size": 2}}
    )
    found = assign(config, devices=EIGHT)
    assert found.is_colocated
    assert found.servers == (("0", "1"), ("2", "3"), ("4", "5"), ("6", "7"))
    assert found.trainer == tuple(EIGHT)


def test_a_part_without_devices_runs_on_the_cpu_and_sees_none() -> None:
    config = settings({"split": {"trainer": 1}}, engine="embedded_process", num_servers=2)
    found = assign(config, devices=["3"])
    assert found.servers == ((), ())
    assert environment_for(found.of_server(0)) == {VISIBLE: ""}
    assert found.of_rank(0) == ("3",)


def test_a_reference_model_may_have_a_device_of_its_own() -> None:
    config = settings({"split": {"servers": 1, "trainer": 1, "reference": 1}})
    found = assign(config, devices=EIGHT)
    assert (found.reference, found.of_rank(0)) == ("2", ("1", "2"))


def test_a_rollout_alone_needs_no_devices_for_the_trainer() -> None:
    config = settings({"split": {"servers": 2, "trainer": 2}}, num_servers=2, processes=2)
    assert assign(config, devices=["0", "1"], trains=False).servers == (("0",), ("1",))


@pytest.mark.parametrize(
    ("placement", "changes", "remedy"),
    [
        (
            {"split": {"servers": 6, "trainer": 2}},
            {"num_servers": 4, "processes": 2},
            "set rollout.num_servers=6",
        ),
        (
            {"split": {"servers": 3}, "tensor_parallel_size": 2},
            {"num_servers": 2},
            "set placement.split.servers=4",
        ),
        ({"colocated": 8}, {"processes": 8}, "set rollout.num_servers=8 and trainer.num_processes=8"),
        ({"colocated": 1, "split": {"servers": 1}}, {}, "unset one of them"),
        ("colocated", {"trainer": {"mode": "async"}}, "set trainer.mode=sync"),
        ({"split": {"servers": 1, "trainer": 1}}, {"engine": "embedded"}, "rollout.engine=embedded_process"),
        ({"tensor_parallel_size": 2}, {"engine": "embedded_process"}, "set rollout.engine=vllm"),
        (
            {"split": {"servers": 1, "trainer": 2}, "reference": "cpu"},
            {"processes": 2},
            "or trainer.num_processes=1",
        ),
    ],
)
def test_a_placement_that_contradicts_itself_is_refused_with_the_remedy(
    placement: Any, changes: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        settings(placement, **changes)


@pytest.mark.parametrize(
    ("placement", "changes", "devices", "message"),
    [
        ({"split": {"servers": 1, "trainer": 1}}, {}, ["0"], r"take 2 devices, but 1 are visible \(0\)"),
        ("colocated", {}, ["0", "1"], "set trainer.num_processes=2 and rollout.num_servers=2"),
        (None, {}, ["0"], "set placement=colocated"),
        (None, {"num_servers": 9}, EIGHT, "9 servers of 1 devices each and 1 .* trainer take 10 devices"),
        (
            {"split": {"servers": 2}, "tensor_parallel_size": 2},
            {},
            ["0:0", "1:0"],
            r"a server would span nodes \(devices 0:0, 1:0\)",
        ),
    ],
)
def test_too_few_devices_are_refused_before_anything_starts(
    placement: Any, changes: dict[str, Any], devices: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        assign(settings(placement, **changes), devices=devices)


def test_weights_reach_servers_on_other_devices_through_host_memory() -> None:
    def transfers(placement: Any, **changes: Any) -> list[str]:
        config = settings(placement, **changes)
        specs = make_server_specs(
            config.model,
            rollout=config.rollout,
            placement=config.placement,
            assignment=assign(config, devices=EIGHT),
        )
        return [spec.weight_transfer for spec in specs]

    assert transfers({"colocated": 1}) == ["auto"]
    assert transfers({"split": {"servers": 1, "trainer": 1}}) == ["shared_memory"]
    assert transfers({"split": {"servers": 1}}) == ["auto"]
    assert transfers(None, rollout={"weight_transfer": "broadcast"}) == ["broadcast"]
    with pytest.raises(ConfigError, match="set shared_memory, broadcast or auto"):
        transfers(None, rollout={"weight_transfer": "cuda_ipc"})


def test_the_devices_of_a_process_are_those_that_it_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALL_DEVICES, raising=False)
    monkeypatch.setenv(VISIBLE, "4,GPU-a5, 6")
    assert visible_devices() == ["4", "GPU-a5", "6"]
    with seeing(["6"]):
        assert os.environ[VISIBLE] == "6"
        assert visible_devices() == ["4", "GPU-a5", "6"]
    assert os.environ[VISIBLE] == "4,GPU-a5, 6"
    monkeypatch.setenv(VISIBLE, "")
    assert visible_devices() == []


def on_ray(placement: Any = None, **more: Any) -> Config:
    return settings(placement, **{**more, "trainer": {"runtime": "ray", **more.get("trainer", {})}})


def test_a_server_reserves_what_its_engine_needs() -> None:
    assert gpus_per_server(on_ray(), has_gpus=True) == 1
    assert gpus_per_server(on_ray(), has_gpus=False) == 0
    assert gpus_per_server(on_ray(model={"device": "cpu"}), has_gpus=True) == 0
    assert gpus_per_server(on_ray(engine="scripted"), has_gpus=True) == 0
    assert gpus_per_server(on_ray({"tensor_parallel_size": 4}), has_gpus=True) == 4
    own = on_ray(trainer={"ray": {"num_gpus_per_server": 0.25, "num_gpus_per_learner": 0}})
    assert gpus_per_server(own, has_gpus=True) == 0.25
    assert (gpus_per_learner(on_ray(), has_gpus=True), gpus_per_learner(own, has_gpus=True)) == (1, 0)


def test_a_split_has_a_bundle_for_each_server_and_each_training_process() -> None:
    config = on_ray(
        {"split": {"servers": 4, "trainer": 2}, "tensor_parallel_size": 2}, num_servers=2, processes=2
    )
    assert bundles_of(config, driver_ip="10.0.0.1") == [
        {"CPU": 1, "GPU": 2},
        {"CPU": 1, "GPU": 2},
        {"CPU": 1, "GPU": 1, "node:10.0.0.1": 0.001},
        {"CPU": 1, "GPU": 1},
    ]


def test_colocated_parts_share_a_bundle_of_one_device() -> None:
    config = on_ray({"colocated": 2}, num_servers=2, processes=2)
    assert bundles_of(config, driver_ip="a") == [{"CPU": 2, "GPU": 1, "node:a": 0.001}, {"CPU": 2, "GPU": 1}]
    wide = on_ray({"colocated": 2, "tensor_parallel_size": 2}, num_servers=1, processes=2)
    with pytest.raises(ConfigError, match=r"set placement\.tensor_parallel_size=1, or placement\.split"):
        bundles_of(wide, driver_ip="a")


def test_the_process_of_the_trainer_sees_the_device_of_the_reference_model_too() -> None:
    config = on_ray({"split": {"servers": 1, "trainer": 1, "reference": 1}})
    assert [bundle["GPU"] for bundle in bundles_of(config, driver_ip="10.0.0.1")] == [1, 2]
