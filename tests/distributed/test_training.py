"""Training on a Ray cluster: its servers, workers and processes, their devices, and the weights that they get."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from agent_loop.config import load_config
from agent_loop.distributed.weights import PublishedWeights, WeightFetcher, WeightStore
from agent_loop.errors import ProcessGroupError
from agent_loop.planning.devices import assign
from agent_loop.runtime.concurrency import run_together
from agent_loop.storage.metrics_file import METRICS_FILE
from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.weights.adapted import AdaptedWeights
from agent_loop.weights.shared import SharedWeights
from tests.cli.project import make_project
from tests.distributed.cluster import cluster_of, ray
from tests.examples.test_recipes import FOLDER, tiny_config
from tests.weights.receiving import PlainTensor, adapted_of, base_weights, flat

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture
def in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


REWARD = """
def reward(output, row):
    return sum(output.response_ids) % 7 / 7
"""


def make_trainer(folder: Path, *overrides: str) -> PPOTrainer:
    path = make_project(folder)
    (folder / "task.py").write_text(REWARD)
    config = load_config(
        path,
        overrides=[
            "trainer.runtime=ray",
            "trainer.ray.num_cpus_per_server=0.01",
            "trainer.ray.num_cpus_per_worker=0.01",
            "trainer.ray.num_cpus_per_learner=0.01",
            "rollout.engine_kwargs.num_threads=1",
            *overrides,
        ],
    )
    return PPOTrainer(config, console=Console(file=io.StringIO()))


def metrics_of(folder: Path, name: str) -> list[float]:
    return [line[name] for line in read_metrics(folder / "run" / METRICS_FILE)]


FORKED = """
from agent_loop import AgentLoopBase, register


@register("two_turns")
class TwoTurns(AgentLoopBase):
    async def run(self, sampling_params, **row):
        async with self.episode(row["raw_prompt"]) as episode:
            await episode.generate(sampling_params)
            await episode.observe([{"role": "user", "content": "go on"}])
            await episode.generate(sampling_params)
        return episode.output()
"""


@pytest.mark.usefixtures("in_the_folder")
def test_workers_of_a_cluster_continue_forked_trajectories(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(FORKED)
    trainer = make_trainer(
        tmp_path,
        "rollout.n=3",
        "rollout.agent.num_workers=2",
        "rollout.agent.default_agent_loop=two_turns",
        f"rollout.agent.loop_files=[{tmp_path}/loops.py]",  # the cluster of an earlier test has another folder
        "rollout.multi_turn.max_turn_tokens=3",
        "rollout.response_length=64",
        "algorithm.adv_estimator=fork",
        "algorithm.fork.choice=every",
        "trainer.total_steps=2",
    )
    asyncio.run(trainer.fit())
    assert all(tokens > 0 for tokens in metrics_of(tmp_path, names.FORK_TOKENS))
    assert metrics_of(tmp_path, names.FORK_LOST_SHARE) == [0, 0]


@pytest.mark.usefixtures("in_the_folder")
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_training_run_on_a_cluster_reaches_its_last_step(max_staleness: int, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        "rollout.num_servers=2",
        "rollout.agent.num_workers=2",
        "trainer.total_steps=4",
        f"trainer.mode={'async' if max_staleness else 'sync'}",
        f"trainer.max_staleness={max_staleness or 1}",
    )
    result = asyncio.run(trainer.fit())
    assert (result.step, result.is_interrupted) == (4, False)
    staleness = metrics_of(tmp_path, names.STALENESS_MAX)
    assert len(staleness) == 4
    assert max(staleness) <= max_staleness


@pytest.mark.usefixtures("in_the_folder")
def test_processes_of_the_cluster_train_together(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "rollout.n=4", "trainer.num_processes=2", "trainer.total_steps=3")
    result = asyncio.run(trainer.fit())
    assert (result.step, result.is_interrupted) == (3, False)
    assert all(norm > 0 for norm in metrics_of(tmp_path, names.GRAD_NORM))
    # The servers sample with the weights that are trained.
    assert max(metrics_of(tmp_path, names.LOGPROB_DIFF_MAX)) < 1e-4


@pytest.mark.usefixtures("in_the_folder")
def test_a_training_process_that_is_killed_ends_the_run_with_an_error_that_names_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "rollout.n=4", "trainer.num_processes=2", "trainer.total_steps=100000")

    async def kill_rank_1() -> None:
        metrics = tmp_path / "run" / METRICS_FILE
        while not (metrics.exists() and len(metrics_of(tmp_path, "step")) >= 2):  # noqa: ASYNC110  (a file)
            await asyncio.sleep(0.1)
        os.kill(rank_1(), signal.SIGKILL)

    async def main() -> None:
        await run_together([fit(), kill_rank_1()])

    async def fit() -> None:
        await trainer.fit()

    with pytest.raises(ProcessGroupError, match="of the 2 processes that train together, process 1 ended"):
        asyncio.run(main())


def rank_1() -> int:
    """Return the process id of the actor of rank 1."""
    (pid,) = (
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"ray::RankActor" in path.read_bytes()
    )
    return pid


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


def test_every_process_of_an_eight_gpu_recipe_sees_the_devices_that_are_planned(tmp_path: Path) -> None:
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


class Fetching:
    """Actor that fetches published weights as a server's actor does."""

    def __init__(self) -> None:
        self._fetcher = WeightFetcher()
        self._bases: list[Any] = []

    async def fetch(self, published: PublishedWeights) -> tuple[str, list[PlainTensor], int]:
        """Return the id of the base, the merged weights, and the number of bases fetched so far."""
        weights = await self._fetcher.fetch(published)
        assert isinstance(weights, AdaptedWeights)
        if not any(base is weights.base for base in self._bases):
            self._bases.append(weights.base)
        return weights.base_id, flat(weights), len(self._bases)


def num_bytes(published: PublishedWeights) -> int:
    return sum(spec.num_bytes for spec in published.tensors)


def test_the_base_is_stored_once_and_a_restarted_actor_gets_it_too() -> None:
    async def main() -> None:
        store, actor = WeightStore(), ray.remote(Fetching).remote()
        references = set[Any]()
        base = base_weights()
        for version in (1, 2):
            weights = adapted_of(base, version=version)
            async with SharedWeights(weights) as shared:
                published = await store.publish(shared, weight_version=version)
            assert published.base is not None
            assert num_bytes(published) * 20 < num_bytes(published.base)
            references |= set(published.base.buckets)
            assert await actor.fetch.remote(published) == ("first", flat(weights), 1)
        assert len(references) == 1
        assert await ray.remote(Fetching).remote().fetch.remote(published) == ("first", flat(weights), 1)
        other = adapted_of(base_weights(1), version=3, base_id="second")
        published = await store.publish(other, weight_version=3)
        assert await actor.fetch.remote(published) == ("second", flat(other), 2)
        assert set(published.base.buckets).isdisjoint(references)
        plain = await store.publish(base.items(), weight_version=4)
        assert plain.base is None
        assert flat(await WeightFetcher().fetch(plain)) == flat(base.items())

    with cluster_of(1):
        asyncio.run(main())
