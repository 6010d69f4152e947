"""Arguments of launch scripts in the style of verl's, converted and trained with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.config import load_config
from tests.cli.project import make_project

TOOLS = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config: {type: native}
"""
INTERACTIONS = """
interaction:
  - name: "gsm8k"
    class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {}
"""
COMMON = """
    data.train_files=data/train.parquet
    data.val_files=['data/test.parquet']
    data.train_batch_size=4
    data.max_prompt_length=1024
    data.max_response_length=32
    data.filter_overlong_prompts=True
    data.truncation=error
    actor_rollout_ref.model.path=model
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.optim.lr=1e-3
    actor_rollout_ref.actor.ppo_mini_batch_size=2
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.rollout.name=hf
    trainer.logger=["console"]
    trainer.n_gpus_per_node=1
    trainer.save_freq=-1
    trainer.test_freq=1
    trainer.default_local_dir=run
    trainer.total_epochs=1
    trainer.device=cpu
"""
GRPO_WITH_TOOL = """
    algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml
"""
GRPO_WITH_INTERACTION = """
    algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2
    actor_rollout_ref.rollout.multi_turn.interaction_config_path=interactions.yaml
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
"""
PPO_BY_RULE = """
    algorithm.adv_estimator=gae critic.model.path=model critic.optim.lr=1e-3 critic.ppo_micro_batch_size_per_gpu=2
    trainer.critic_warmup=0
"""


def record(number: int, *, interaction: bool) -> dict[str, Any]:
    truth = str(6 * number)
    extra: dict[str, Any] = {
        "split": "train",
        "index": number,
        "answer": f"#### {truth}",
        "interaction_kwargs": {"query": "6?", "ground_truth": truth},
    }
    if interaction:
        extra["interaction_kwargs"]["name"] = "gsm8k"
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is 6 * {number}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra,
    }


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("command", [GRPO_WITH_TOOL, GRPO_WITH_INTERACTION, PPO_BY_RULE])
def test_converted_arguments_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.yaml").write_text(TOOLS)
    (tmp_path / "interactions.yaml").write_text(INTERACTIONS)
    (tmp_path / "data").mkdir()
    for name, count in (("train", 8), ("test", 2)):
        rows = [record(number, interaction=command is GRPO_WITH_INTERACTION) for number in range(count)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / f"{name}.parquet")

    result = CliRunner().invoke(app, ["from-verl", *(COMMON + command).split(), "--out", "run.yaml"])
    assert result.exit_code == 0, result.output
    assert "not supported" not in result.output
    config = load_config("run.yaml")
    assert (config.trainer.total_epochs, config.actor.ppo_mini_batches) == (1, 2)
    trained = CliRunner().invoke(app, ["train", "run.yaml"])
    assert trained.exit_code == 0, trained.output
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained_steps = [line["step"] for line in metrics if "actor/grad_norm" in line]
    assert trained_steps == [1, 2]
    rewards = [line["reward/mean"] for line in metrics if "reward/mean" in line]
    assert len(rewards) == 2
    assert all(0 <= reward <= 1 for reward in rewards)
