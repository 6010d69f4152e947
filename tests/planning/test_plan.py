"""Assignment of devices, and `agent-loop plan`: what fits, and the smallest change if something does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.config import Config, parse_section
from agent_loop.distributed.device_group import bundles_of, gpus_per_learner, gpus_per_server
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import merge_mappings
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
from agent_loop.planning.fit import apply, make_plan, parse_devices, smallest_change
from agent_loop.planning.sizes import ModelShape, parse_shape, read_shape
from agent_loop.servers.factory import make_server_specs
from tests.families.zoo import Family

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


def split(**devices: int) -> dict[str, Any]:
    return {"split": devices}


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
        (split(servers=6, trainer=2), {"num_servers": 4, "processes": 2}, "set rollout.num_servers=6"),
        (
            {**split(servers=3), "tensor_parallel_size": 2},
            {"num_servers": 2},
            "set placement.split.servers=4",
        ),
        ({"colocated": 8}, {"processes": 8}, "set rollout.num_servers=8 and trainer.num_processes=8"),
        ({"colocated": 1, **split(servers=1)}, {}, "unset one of them"),
        ("colocated", {"trainer": {"mode": "async"}}, "set trainer.mode=sync"),
        (split(servers=1, trainer=1), {"engine": "embedded"}, "rollout.engine=embedded_process"),
        ({"tensor_parallel_size": 2}, {"engine": "embedded_process"}, "set rollout.engine=vllm"),
        (
            {**split(servers=1, trainer=2), "reference": "cpu"},
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
        ({**split(servers=2), "tensor_parallel_size": 2}, {}, ["0:0", "1:0"], "a server would span nodes"),
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


MODELS = Path("examples/recipes/models")
BASE: dict[str, Any] = {
    "data": {"train_batch_size": 64},
    "model": {"dtype": "bfloat16"},
    "rollout": {"engine": "vllm", "n": 8, "prompt_length": 1024, "response_length": 3072},
    "actor": {"gradient_checkpointing": True},
}


SIX_AND_TWO: dict[str, Any] = {"rollout": {"num_servers": 6}, "trainer": {"num_processes": 2}}


@pytest.fixture(scope="module")
def qwen3_8b() -> ModelShape:
    return read_shape(MODELS / "qwen3-8b.json")


def settings_of(**changes: Any) -> Config:
    return parse_section(Config, merge_mappings(BASE, changes), where="test")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-0.6b", 0.596), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.53)],
)
def test_parameters_are_those_that_were_published(name: str, billions: float) -> None:
    assert read_shape(MODELS / f"{name}.json").parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma3_text", "gpt2", "gpt_oss", "mamba"])
def test_a_model_of_any_type_is_planned(kind: str) -> None:
    family = Family(kind, kind)
    shape = parse_shape(family.config().to_dict(), where="test")
    assert shape.parameters == family.build().num_parameters()
    for rank in (0, 8):
        plan = make_plan(settings_of(model={"lora_rank": rank}), shape, machine=parse_devices("2x80GB"))
        assert all(value > 0 for load in plan.loads for value in load.parts.values())


def test_the_kv_cache_is_that_of_the_model() -> None:
    sizes = {"hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 512, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    shape = parse_shape({"model_type": "llama", **sizes, **heads}, where="test")
    assert shape.kv_bytes_per_token(2) == 3 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("devices", "changes", "fault", "change"),
    [
        (  # a full update of 8B on two devices beside six servers
            "8x80GB",
            SIX_AND_TWO | {"placement": {"split": {"servers": 6, "trainer": 2}}},
            "update needs",
            ("model.lora_rank=32",),
        ),
        (  # activations without checkpointing
            "1x80GB",
            {
                "placement": "colocated",
                "model": {"lora_rank": 32},
                "rollout": {"engine_kwargs": {"gpu_memory_utilization": 0.5}},
                "actor": {"gradient_checkpointing": False},
            },
            "update needs",
            ("actor.gradient_checkpointing=true",),
        ),
        (  # a KV cache that holds no row
            "2x80GB",
            {
                "model": {"lora_rank": 32},
                "rollout": {"engine_kwargs": {"gpu_memory_utilization": 0.22}},
                "actor": {"max_tokens_per_micro_batch": 4096},
            },
            "the KV cache of a server has 0.0 GB per device, and a row of 4096 tokens needs 0.6 GB",
            ("rollout.engine_kwargs.gpu_memory_utilization=0.5",),
        ),
        (  # rows that are longer than the positions of the model
            "8x80GB",
            {"model": {"lora_rank": 32}, "rollout": {"response_length": 65536}},
            "the model has 40960 positions",
            ("rollout.response_length=32768",),
        ),
    ],
)
def test_a_configuration_that_does_not_fit_gets_the_smallest_change_that_does(
    devices: str, changes: dict[str, Any], fault: str, change: tuple[str, ...], qwen3_8b: ModelShape
) -> None:
    config, machine, shape = settings_of(**changes), parse_devices(devices), qwen3_8b
    plan = make_plan(config, shape, machine=machine)
    assert fault in plan.faults[0]
    assert smallest_change(config, shape, machine=machine) == change
    assert not make_plan(apply(config, change), shape, machine=machine).faults


def test_a_run_that_nothing_makes_fit_says_so(qwen3_8b: ModelShape) -> None:
    config, machine = settings_of(placement="colocated"), parse_devices("1x4GB")
    assert smallest_change(config, qwen3_8b, machine=machine) is None


def test_the_command_prints_places_and_memory_and_ends_with_1_if_something_does_not_fit(
    tmp_path: Path, qwen3_8b: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_loop.cli.plan.read_shape", lambda path: qwen3_8b)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(merge_mappings(BASE, SIX_AND_TWO)))
    options = [str(path), "--devices", "8x80GB", "--model", str(MODELS / "qwen3-8b.json")]
    done = CliRunner().invoke(app, ["plan", *options])
    assert done.exit_code == 1
    assert "smallest change: set model.lora_rank=32" in done.output
    done = CliRunner().invoke(app, ["plan", *options, "model.lora_rank=32", "--json"])
    found = json.loads(done.output)
    assert done.exit_code == 0
    assert found["places"] == {
        **{f"server {index}": str(index) for index in range(6)},
        "trainer process 0": "6",
        "trainer process 1": "7",
    }
    assert all(load["total"] <= load["capacity"] for load in found["loads"])


@pytest.mark.parametrize("text", ["80GB", "8x80", "8 gpus", "0.5x80GB"])
def test_devices_in_another_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="8x80GB"):
        parse_devices(text)


# The benchmark has more models.
@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "model",
    [
        "llama, float32",
        "qwen2, tied, large vocabulary",
        "qwen3, selective checkpointing",
        "qwen3, bfloat16",
        "mistral, LoRA",
        "qwen3_moe, 16 experts",
    ],
)
def test_the_planned_memory_of_an_update_is_within_15_percent_of_the_measured_peak(model: str) -> None:
    command = [sys.executable, "benchmarks/bench_plan.py", "--only", model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert model in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
