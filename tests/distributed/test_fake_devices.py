"""An eight-GPU recipe on a Ray cluster that claims to have eight devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agent_loop.config import load_config
from agent_loop.planning.devices import assign
from tests.examples.test_recipes import FOLDER, tiny_config

pytest.importorskip("ray", reason='needs pip install "agent-loop[ray]"')
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

DRIVER = """
import sys

import ray

from agent_loop.cli import main

ray.init(address="local", num_cpus=16, num_gpus=8, include_dashboard=False, log_to_driver=False)
sys.argv = ["agent-loop", "train", "config.yaml"]
main()
"""
TASK = '''
import json
import os
from pathlib import Path


def hosts():
    """Yield the variable of each engine of this test."""
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_text()
            variables = (folder / "environ").read_text().split("\\0")
        except OSError:
            continue
        if "servers.embedded_process" in command and f"RECIPE_FOLDER={Path.cwd()}" in variables:
            yield [text.partition("=")[2] for text in variables if text.startswith("CUDA_VISIBLE_DEVICES=")]


def reward(output, row):
    Path("servers.json").write_text(json.dumps([*hosts()]))
    return sum(output.response_ids) % 97 / 97


def loss(logprobs_BT, *, old_logprobs_BT, advantages_BT, mask_BT, config):
    """Return the loss of REINFORCE. Runs in every training process, which holds its part of the reference model too."""
    Path(f"trainer-{os.getpid()}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    return -logprobs_BT * advantages_BT
'''


def test_every_process_of_an_eight_gpu_recipe_sees_as_many_devices_as_planned_and_its_own_on_ray(
    tmp_path: Path,
) -> None:
    recipe = FOLDER / "qwen3-4b-8x80gb.yaml"
    places = assign(load_config(recipe), devices=tuple("01234567"))
    path = tiny_config(recipe, tmp_path, whole=True)
    values = yaml.safe_load(path.read_text())
    values["actor"] |= {"policy_loss": "task.py:loss", "kl_loss_coef": 0.1}
    values["trainer"] |= {"runtime": "ray", "ray": {"num_cpus_per_worker": 0.1}}
    path.write_text(yaml.safe_dump(values))
    for name, text in {"task.py": TASK, "driver.py": DRIVER}.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "driver.py"],
        cwd=tmp_path,
        env={**os.environ, "RECIPE_FOLDER": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    servers = [seen for (seen,) in json.loads((tmp_path / "servers.json").read_text())]
    trainers = [file.read_text() for file in tmp_path.glob("trainer-*")]
    assert places.servers is not None
    assert places.trainer is not None
    assert (len(servers), len(trainers)) == (len(places.servers), len(places.trainer)) == (6, 2)
    assert sorted([*servers, *trainers]) == list("01234567")
