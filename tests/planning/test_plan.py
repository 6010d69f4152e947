"""`agent-loop plan`: what fits, and the smallest change if something does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.config import Config, parse_section
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import merge_mappings
from agent_loop.planning.fit import apply, make_plan, parse_devices, smallest_change
from agent_loop.planning.sizes import ModelShape, parse_shape, read_shape
from tests.families.family import Family

MODELS = Path("examples/recipes/models")
BASE: dict[str, Any] = {
    "data": {"train_batch_size": 64},
    "model": {"dtype": "bfloat16"},
    "rollout": {"engine": "vllm", "n": 8, "prompt_length": 1024, "response_length": 3072},
    "actor": {"gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def qwen3_8b() -> ModelShape:
    return read_shape(MODELS / "qwen3-8b.json")


def settings(**changes: Any) -> Config:
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
        plan = make_plan(settings(model={"lora_rank": rank}), shape, machine=parse_devices("2x80GB"))
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
            {
                "rollout": {"num_servers": 6},
                "trainer": {"num_processes": 2},
                "placement": {"split": {"servers": 6, "trainer": 2}},
            },
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
    config, machine, shape = settings(**changes), parse_devices(devices), qwen3_8b
    plan = make_plan(config, shape, machine=machine)
    assert fault in plan.faults[0]
    assert smallest_change(config, shape, machine=machine) == change
    assert not make_plan(apply(config, change), shape, machine=machine).faults


def test_a_run_that_nothing_makes_fit_says_so(qwen3_8b: ModelShape) -> None:
    config, machine = settings(placement="colocated"), parse_devices("1x4GB")
    assert smallest_change(config, qwen3_8b, machine=machine) is None


def test_the_command_prints_places_and_memory_and_ends_with_1_if_something_does_not_fit(
    tmp_path: Path, qwen3_8b: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_loop.cli.plan.read_shape", lambda path: qwen3_8b)
    path = tmp_path / "config.yaml"
    changes = {"rollout": {"num_servers": 6}, "trainer": {"num_processes": 2}}
    path.write_text(yaml.safe_dump(merge_mappings(BASE, changes)))
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
