"""The functions of verl's trainer that read a batch of rollouts, on batches of this package."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("verl")

import torch
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    process_validation_metrics,
)
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.reward import extract_reward

from tests.cli.project import save_model
from tests.verl.harness import RewardWorker, ScriptedClient, batch_of, run_ours, verl_config

pytestmark = [pytest.mark.verl, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataProto, DataProto]:
    """Return the rows of a step, and the batch of their rollouts."""
    model = save_model(tmp_path_factory.mktemp("verl"))
    prompts = ["a", "a", "b", "b"]
    rows = batch_of(prompts, uid=["1", "1", "2", "2"], data_source=["x"] * 4, index=[0, 0, 1, 1])
    handles = [RewardWorker(lambda text: float(len(text) % 3))]

    lengths = iter(range(1, 100))
    client = ScriptedClient(lambda text: "x" * next(lengths) + "<|im_end|>")
    return rows, run_ours(
        verl_config(model), client, rows.select(deepcopy=True), reward_loop_worker_handles=handles
    )


def test_a_step_computes_advantages_and_metrics(step: tuple[DataProto, DataProto]) -> None:
    rows, rollouts = step
    rows = DataProto.from_dict(tensors={"dummy": torch.zeros(4, 1)}, non_tensors=rows.non_tensor_batch)
    batch = rows.union(rollouts)
    reward, extra = extract_reward(batch)
    assert reward.sum(dim=1).tolist() == rollouts.non_tensor_batch["score"].tolist()
    assert set(extra) == {"acc", "score"}
    batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = reward
    batch = compute_advantage(batch, adv_estimator=AdvantageEstimator.GRPO)
    advantages = batch.batch["advantages"]
    assert torch.equal(advantages != 0, (batch.batch["response_mask"] * advantages) != 0)
    assert advantages.abs().sum() > 0
    batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(dim=-1).tolist()
    timing = {"gen": 1.0, "step": 2.0, "old_log_prob": 1.0, **rollouts.meta_info["timing"]}
    metrics = {
        **compute_data_metrics(batch=batch, use_critic=False),
        **compute_timing_metrics(batch=batch, timing_raw=timing),
        **compute_throughout_metrics(batch=batch, timing_raw=timing, n_gpus=1),
    }
    assert metrics["num_turns/mean"] == 2
    assert metrics["response/aborted_ratio"] == 0
    assert all(np.isfinite(value) for value in metrics.values())


def test_batches_are_concatenated_padded_and_unpadded(step: tuple[DataProto, DataProto]) -> None:
    _, rollouts = step
    rollouts.meta_info = {}
    padded, num_padding = pad_dataproto_to_divisor(rollouts, 3)
    assert (len(padded), num_padding) == (6, 2)
    again = unpad_dataproto(padded, num_padding)
    assert torch.equal(again.batch["input_ids"], rollouts.batch["input_ids"])
    twice = DataProto.concat([rollouts, again])
    assert len(twice) == 8
    assert len(twice.chunk(2)[0]) == len(twice.repeat(2)) // 4


def test_validation_metrics_come_from_the_extra_values_of_rewards(step: tuple[DataProto, DataProto]) -> None:
    _, rollouts = step
    scores = {"score": rollouts.non_tensor_batch["score"].tolist()}
    found = process_validation_metrics(["x"] * 4, ["1", "1", "2", "2"], scores)
    assert found["x"]["score"]["mean@2"] == pytest.approx(np.mean(scores["score"]))
