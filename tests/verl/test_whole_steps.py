"""verl's trainer, started by its own command on a CPU: whole steps and validation with the rollouts of this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from agent_loop.storage import StoredRun
from agent_loop.viewer.source import RunSource

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
OURS = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=agent_loop.integrations.verl.VerlAgentLoopManager"
PLUGINS = {
    "VERL_USE_EXTERNAL_MODULES": "tests.verl.cpu_platform,tests.verl.embedded_rollout",
    "VERL_PLATFORM": "cpu",
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
}
SETTINGS = """
trainer.device=cpu trainer.n_gpus_per_node=1 +ray_kwargs.ray_init.num_gpus=1 ray_kwargs.ray_init.num_cpus=32
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
trainer.total_training_steps=2 trainer.test_freq=2 trainer.save_freq=-1 trainer.logger=[console,file]
data.train_batch_size=2 data.max_prompt_length=400 data.max_response_length=24 data.dataloader_num_workers=0
algorithm.adv_estimator=grpo reward.num_workers=1
reward.custom_reward_function.path=reward.py reward.custom_reward_function.name=score
actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False actor_rollout_ref.actor.fsdp_config.model_dtype=float32
actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.optim.lr=1e-3
actor_rollout_ref.rollout.name=embedded actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.calculate_log_probs=True
actor_rollout_ref.rollout.load_format=auto actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.agent.num_workers=2
"""
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None, **more):
    return sum(map(ord, solution_str)) % 7 / 7
"""


def train(folder: Path, *settings: str, model: Path, rows: Path) -> list[dict[str, Any]]:
    """Run verl's training command in a new folder, and return the metrics that it logged, from step 0 on."""
    (folder / "run").mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD)
    files = [
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *SETTINGS.split(), *files, *settings],
        cwd=folder,
        env={**os.environ, **PLUGINS, "VERL_FILE_LOGGER_PATH": str(folder / "run" / "metrics.jsonl")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    return [line["data"] for line in lines]


@pytest.mark.parametrize("use_v1", [False, True], ids=["V0", "V1"])
def test_two_steps_of_verls_trainer_update_the_weights_that_sample(
    use_v1: bool, model: Path, gsm8k: Path, tmp_path: Path
) -> None:
    trainer = f"trainer.use_v1={use_v1}"
    run_dir = tmp_path / "ours" / "run"
    folder = f"+agent_loop_config.trainer.run_dir={run_dir}"
    ours = train(tmp_path / "ours", trainer, OURS, folder, model=model, rows=gsm8k)
    verls = train(tmp_path / "verls", trainer, model=model, rows=gsm8k)

    assert ours[0] == pytest.approx(verls[0])  # a greedy validation
    for step in (1, 2):
        assert ours[step]["actor/grad_norm"] > 0
        assert (
            ours[step]["training/rollout_probs_diff_max"] < 1e-3
        )  # sampled with the weights that are trained
        assert verls[step].keys() <= ours[step].keys()
    assert ours[2].keys() >= ours[0].keys()  # validation after the last step

    assert_stored(run_dir, ours)


def assert_stored(run_dir: Path, metrics: list[dict[str, Any]]) -> None:
    """Assert that a run folder has the trajectories of all steps, and verl's metrics, for the viewer."""
    rows = [row for file in StoredRun(run_dir).files() for row in StoredRun(file.path).rows()]
    trained = {(row["step"], row["group"], row["rollout"]) for row in rows if row["split"] == "train"}
    assert trained == set(product((1, 2), range(2), range(4)))
    assert {row["step"] for row in rows if row["split"] == "val"} == {0, 2}
    assert {row["staleness"] for row in rows} == {0}
    for step in (1, 2):
        rewards = [row["reward"] for row in rows if (row["split"], row["step"]) == ("train", step)]
        assert metrics[step]["critic/score/mean"] == pytest.approx(mean(rewards))
    source = RunSource(run_dir)
    lines = source.metrics()["lines"]
    assert [line.get("reward/mean") for line in lines] == [line.get("critic/score/mean") for line in metrics]
    assert source.config()["data"]["train_batch_size"] == 2
