"""The recipes for Qwen3: each fits its machine, and trains a tiny random model of the same architecture."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.config import load_config
from agent_loop.files.plain_values import read_yaml
from agent_loop.planning.devices import ALL_DEVICES
from agent_loop.planning.fit import make_plan, parse_devices
from agent_loop.planning.sizes import read_shape
from agent_loop.training.metrics import read_metrics
from tests.cli.project import make_project

FOLDER = Path("examples/recipes")
RECIPES = sorted(FOLDER.glob("*.yaml"))
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
"""Sizes that replace the published ones."""
REWARD = '''
import json
import os
from functools import cache
from pathlib import Path


def children(part):
    """Yield the variable of each child process whose command has this part."""
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            if part in Path(f"/proc/{pid}/cmdline").read_text():
                variables = Path(f"/proc/{pid}/environ").read_text().split("\\0")
                yield [text.partition("=")[2] for text in variables if text.startswith("CUDA_VISIBLE_DEVICES=")]


def reward(output, row):
    seen = {
        "servers": [*children("servers.embedded_process")],
        "trainer": [[os.environ.get("CUDA_VISIBLE_DEVICES")], *children("training.ranks")],
    }
    Path("devices.json").write_text(json.dumps(seen))
    return sum(output.response_ids) % 7 / 7
'''


def option(recipe: Path, name: str) -> str:
    found = re.search(rf"--{name} (\S+)", recipe.read_text())
    assert found, f"{recipe} has no --{name} in its command"
    return found[1]


shape_of = cache(read_shape)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_the_machine_that_it_names(recipe: Path) -> None:
    assert "not yet run" in recipe.read_text().splitlines()[0]
    plan = make_plan(
        load_config(recipe),
        shape_of(option(recipe, "model")),
        machine=parse_devices(option(recipe, "devices")),
    )
    assert not plan.faults
    assert plan.concurrent_rows >= load_config(recipe).rollout.num_servers


@pytest.mark.parametrize(
    "script", sorted(FOLDER.glob("*.sh")) + sorted(FOLDER.glob("*.sbatch")), ids=lambda p: p.name
)
def test_a_job_script_is_valid_and_names_recipes_that_exist(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert all(
        Path(name).exists() for name in re.findall(r"examples/recipes/[\w.-]+\.yaml", script.read_text())
    )


def tiny_config(recipe: Path, folder: Path, *, whole: bool = False) -> Path:
    """Write a project with a tiny model, and the recipe's settings with short rows and an engine for CPUs.

    Args:
        recipe: The recipe.
        folder: Folder of the project.
        whole: Whether all devices of the recipe are used; otherwise one server and at most two training processes.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = make_project(folder)
    base: dict[str, Any] = yaml.safe_load(path.read_text())
    values: dict[str, Any] = read_yaml(recipe, what="recipe")
    (folder / "task.py").write_text(REWARD)
    published: dict[str, Any] = json.loads(Path(option(recipe, "model")).read_text())
    own = json.loads((folder / "model" / "config.json").read_text())
    same = {name: own[name] for name in ("vocab_size", "eos_token_id", "bos_token_id")}
    sizes = {**published, **{name: value for name, value in SMALL.items() if name in published}, **same}
    known: Any = AutoConfig
    make: Any = AutoModelForCausalLM
    cast(Any, torch).manual_seed(0)
    make.from_config(known.for_model(sizes.pop("model_type"), **sizes)).save_pretrained(folder / "model")

    processes = values["trainer"]["num_processes"] if whole else min(2, values["trainer"]["num_processes"])
    servers = values["rollout"]["num_servers"] if whole else 1
    values["placement"] = {"split": {"servers": servers, "trainer": processes}}
    values["data"] = base["data"]
    values["model"] |= {"path": "model", "device": "auto"}
    values["rollout"] = {**base["rollout"], "engine": "embedded_process", "num_servers": servers}
    values["reward"] = base["reward"]
    values["actor"]["max_tokens_per_micro_batch"] = 256
    values["trainer"] = {**base["trainer"], "total_steps": 1, "num_processes": processes}
    path.write_text(yaml.safe_dump(values))
    return path


def train(path: Path) -> dict[str, Any]:
    """Train on a fake machine of eight devices, and return the devices that each process saw."""
    done = subprocess.run(
        [sys.executable, "-m", "agent_loop", "train", path.name],
        cwd=path.parent,
        env={**os.environ, ALL_DEVICES: "0,1,2,3,4,5,6,7"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in read_metrics(path.parent / "run" / "metrics.jsonl")] == [1]
    return json.loads((path.parent / "devices.json").read_text())


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_a_tiny_model_of_the_same_architecture(recipe: Path, tmp_path: Path) -> None:
    seen = train(tiny_config(recipe, tmp_path))
    assert seen["servers"] == [["0"]]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_process_of_an_eight_gpu_recipe_sees_the_devices_that_the_plan_prints(tmp_path: Path) -> None:
    recipe = FOLDER / "qwen3-4b-8x80gb.yaml"
    options = ["--devices", option(recipe, "devices"), "--model", option(recipe, "model"), "--json"]
    places = json.loads(CliRunner().invoke(app, ["plan", str(recipe), *options]).output)["places"]
    seen = train(tiny_config(recipe, tmp_path, whole=True))

    assert sorted(seen["servers"]) == [[places[f"server {index}"]] for index in range(6)]
    assert seen["trainer"] == [[places[f"trainer process {rank}"]] for rank in range(2)]
