"""`agent-loop from-verl`, verl's settings on the command line of `agent-loop train`, and trainings with them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.cli.from_verl import convert
from agent_loop.config import load_config
from agent_loop.errors import ConfigError
from agent_loop.training.ppo_trainer import with_total_steps
from tests.cli.project import make_project

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

P = "data.max_prompt_length=700"
BUFFER = "reward_model.overlong_buffer"
F, GDPO = "algorithm.filter_groups", "algorithm.adv_estimator=gdpo"
TOOLS = f"{R}.multi_turn.tool_config_path=t.yaml"

SCRIPT = """
set -xeuo pipefail
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
prompt=1024
response=$((1024 * 3))
DATA=(
    data.train_files="['$HOME/data/train.parquet', '$HOME/data/more.parquet']"
    data.val_files=$HOME/data/test.parquet
    data.train_batch_size=256
    data.max_prompt_length=$prompt
    data.max_response_length=$response
    data.truncation='error'
    data.filter_overlong_prompts=True
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(( (prompt + response) * 2 ))
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.ref.fsdp_config.param_offload=True
)
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \\
    "${DATA[@]}" \\
    "${ACTOR[@]}" \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \\
    actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$PWD/tools.yaml" \\
    custom_reward_function.path=rewards.py \\
    trainer.logger='["console","wandb"]' \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 \\
    trainer.save_freq=-1 trainer.test_freq=5 \\
    trainer.resume_mode=auto \\
    data.custom_cls.path=mine.py \\
    data.mistake=1 \\
    trainer.total_epochs=15 $@ 2>&1 | tee log.txt
"""


def arguments_of(script: str, folder: Path, *arguments: str) -> list[str]:
    """Return the arguments of the trainer, printed by the stub in docs/from-verl.md."""
    page = (Path(__file__).parents[2] / "docs" / "from-verl.md").read_text(encoding="utf-8")
    [stub] = re.findall(r"```bash\n(#!/usr/bin/env bash\n.*?)```", page, re.DOTALL)
    (folder / "stub").mkdir()
    (folder / "stub" / "python3").write_text(stub)
    (folder / "stub" / "python3").chmod(0o755)
    (folder / "run.sh").write_text(script)
    path = f"{folder / 'stub'}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": "/home/u", "PWD": str(folder)}
    ran = subprocess.run(
        ["bash", "run.sh", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        check=True,
        text=True,
    )
    return ran.stdout.splitlines()


def test_the_arguments_of_a_launch_script_become_a_configuration_that_loads(tmp_path: Path) -> None:
    target = tmp_path / "config.yaml"
    arguments = arguments_of(SCRIPT, tmp_path, "trainer.test_freq=7")
    result = CliRunner().invoke(app, ["from-verl", *arguments, "--out", str(target)])
    assert result.exit_code == 0, result.output
    config = load_config(target)
    assert config.model.path == "Qwen/Qwen3-8B"
    assert config.data.train_files == ["/home/u/data/train.parquet", "/home/u/data/more.parquet"]
    assert config.data.val_files == ["/home/u/data/test.parquet"]
    assert (config.rollout.prompt_length, config.rollout.response_length) == (1024, 3072)
    assert config.rollout.engine == "vllm"
    assert config.rollout.engine_kwargs == {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.6,
        "disable_mm_preprocessor_cache": True,
    }
    assert (config.rollout.num_servers, config.trainer.num_processes) == (4, 8)
    assert config.placement.colocated == "all"
    assert config.rollout.default_agent_loop == "tool_agent"
    actor = config.actor
    assert (actor.lr, actor.ppo_mini_batches, actor.max_tokens_per_micro_batch) == (1e-6, 4, 8192)
    assert (actor.kl_loss_coef, actor.kl_loss_type, actor.policy_loss) == (0.001, "k3", "gspo")
    assert config.reward.function == "rewards.py:compute_score"
    trainer = config.trainer
    assert (trainer.save_every, trainer.val_every, trainer.total_epochs) == (None, 7, 15)
    assert trainer.run_dir == "checkpoints/verl_examples/gsm8k"
    # defaults of verl that differ
    assert (actor.weight_decay, actor.clip_ratio_high, actor.clip_ratio_c) == (0.01, 0.2, 3.0)
    assert (actor.old_log_probs, config.rollout.val.temperature, trainer.val_before_train) == (
        "recompute",
        0,
        True,
    )
    sections = dict(re.findall(r"^([a-z].*)\n((?:  .+\n)+)", result.output, re.MULTILINE))
    assert (
        "data.custom_cls.path is 'mine.py', which is not supported; name a function"
        in sections["not supported; what to do"]
    )
    assert "data.mistake=1" in sections["unknown to verl's trainer and to this package"]
    assert "rows with longer prompts stay" in sections["different from verl"]
    assert "model.path=Qwen" not in sections["not needed, and why"]
    assert "trainer.save_freq=-1 is trainer.save_every: None" in sections["taken over"]
    assert "the reference model and old log-probs" in sections["not needed, and why"]


def test_the_yaml_of_hydra_is_converted_like_arguments(tmp_path: Path) -> None:
    text = """
actor_rollout_ref:
  model: {path: m, lora_rank: 8, lora: {rank: 0, alpha: 32}, _target_: verl.workers.config.HFModelConfig}
  actor: {ppo_mini_batch_size: 32, strategy: fsdp2, optim: {clip_grad: 0.5}, grad_clip: 1.0}
  rollout:
    name: vllm
    prompt_length: "${oc.select:data.max_prompt_length,512}"
    agent: {default_agent_loop: single_turn_agent}
    multi_turn: {enable: false, tool_config_path: t.yaml}
data: {train_batch_size: 64, max_prompt_length: 700, seed: null}
reward: {reward_model: {rollout: {name: "???"}}}
trainer: {total_training_steps: null, total_epochs: 2, device: cpu}
"""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    found = convert([str(path), "trainer.n_gpus_per_node=1"])
    settings = found.settings
    assert (settings["rollout"]["prompt_length"], settings["actor"]["ppo_mini_batches"]) == (700, 2)
    assert (settings["model"]["lora_rank"], settings["actor"]["grad_clip"]) == (8, 0.5)
    assert settings["rollout"]["agent"] == {"default_agent_loop": "single_turn_agent"}
    assert settings["reward"]["function"] == "agent_loop.integrations.verl.rules:default_compute_score"
    assert "seed" not in settings["data"]
    assert "total_steps" not in settings["trainer"]
    assert {report.status for report in found.reports} == {"taken over", "not needed"}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("run.sh", "'run.sh' is neither a YAML file nor key=value; docs/from-verl.md shows how to print"),
        ("rollout.yaml", "'rollout.yaml' is not a configuration of verl"),
        ("missing.yaml", "does not exist"),
    ],
)
def test_what_is_no_setting_of_verl_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollout.yaml").write_text("rollout: {n: 3}")
    with pytest.raises(ConfigError, match=complaint):
        convert([given])


def test_a_file_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    out.write_text("kept")
    command = ["from-verl", "actor_rollout_ref.model.path=m", "--out", str(out)]
    assert isinstance(CliRunner().invoke(app, command).exception, ConfigError)
    assert out.read_text() == "kept"
    assert CliRunner().invoke(app, [*command, "--overwrite"]).exit_code == 0


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["trainer.save_freq=often"],
            r"trainer.save_freq \(trainer.save_every here\) is 'often': input should",
        ),
        (["trainer.test_freq=2.5"], "trainer.test_freq .* is 2.5: input should be a valid integer"),
        ([f"{R}.over_sample_rate=abc"], f"{R}.over_sample_rate is 'abc': input should be a valid number"),
        ([f"{A}.ppo_mini_batch_size=abc"], f"{A}.ppo_mini_batch_size is 'abc'"),
        ([f"{A}.use_kl_loss=abc"], f"{A}.use_kl_loss is 'abc'"),
        ([f"{R}.n=0"], f"{R}.n .* is 0: input should be greater than or equal to 1"),
        (["trainer.nnodes=2"], "trainer.nnodes is 2, but trainer.n_gpus_per_node is not given"),
        ([f"{R}.mode=sync"], "servers are always asynchronous"),
        (["trainer.save_freq=a", "critic.lrr=1"], "unknown key 'critic.lrr'(.|\n)*save_freq"),
    ],
)
def test_a_wrong_value_is_refused_under_the_name_that_was_given(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(overrides=overrides)


def test_a_run_that_differs_from_verls_is_told(caplog: pytest.LogCaptureFixture) -> None:
    load_config(overrides=["data.filter_overlong_prompts=True"])
    assert "data.filter_overlong_prompts: rows with longer prompts stay" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "setting", "expected"),
    [
        ([f"{A}.ppo_mini_batch_size=64", "data.train_batch_size=256"], "actor.ppo_mini_batches", 4),
        (["data.train_batch_size=100", f"{A}.ppo_mini_batch_size=64"], "actor.ppo_mini_batches", 2),
        ([f"{A}.ppo_mini_batch_size=8", "actor.ppo_mini_batches=3"], "actor.ppo_mini_batches", 3),
        (["data.train_batch_size=0", f"{A}.ppo_mini_batch_size=8"], "data.train_batch_size", 8),
        ([f"{A}.ppo_micro_batch_size_per_gpu=4"], "actor.max_tokens_per_micro_batch", 4096),
        ([f"{A}.ppo_max_token_len_per_gpu=100"], "actor.max_tokens_per_micro_batch", 1024),
        ([f"{A}.use_kl_loss=False", f"{A}.kl_loss_coef=0.1"], "actor.kl_loss_coef", 0.0),
        ([f"{A}.kl_loss_coef=0.1", f"{A}.use_kl_loss=True"], "actor.kl_loss_coef", 0.1),
        ([f"{A}.kl_loss_type=low_var_kl"], "actor.kl_loss_type", "k3"),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.2"], "algorithm.kl_reward_coef", 0.2),
        ([f"{A}.clip_ratio=0.1"], "actor.clip_ratio_high", 0.1),
        ([f"{A}.clip_ratio=0.1", f"{A}.clip_ratio_high=0.3"], "actor.clip_ratio_low", 0.1),
        ([f"{A}.clip_ratio_c=10.0"], "actor.clip_ratio_c", 10.0),
        ([f"{A}.policy_loss.loss_mode=cispo"], "actor.policy_loss", "cispo"),
        ([f"{A}.loss_agg_mode=seq-mean-token-sum"], "actor.loss_length", 1),
        ([f"{A}.optim.lr_warmup_steps_ratio=.1", "trainer.total_training_steps=50"], "actor.warmup_steps", 5),
        ([f"{A}.optim.lr_warmup_steps=-1"], "actor.warmup_steps", 0),
        ([f"{R}.val_kwargs.do_sample=False"], "rollout.val.temperature", 0.0),
        ([f"{R}.name=sglang", f"{R}.enforce_eager=True"], "rollout.engine_kwargs", {"disable_cuda_graph": True}),
        ([f"{R}.gpu_memory_utilization=0.5"], "rollout.engine_kwargs", {}),
        ([f"{R}.over_sample_rate=0.5"], "rollout.over_sample", 1.5),
        ([f"{R}.multi_turn.max_turns=3"], "rollout.multi_turn.max_assistant_turns", 3),
        (["trainer.n_gpus_per_node=2", "trainer.nnodes=2"], "trainer.num_processes", 4),
        (["trainer.n_gpus_per_node=2", "trainer.nnodes=2"], "trainer.runtime", "ray"),
        (["trainer.save_freq=-1"], "trainer.save_every", None),
        (["trainer.save_freq='20'"], "trainer.save_every", 20),
        ([TOOLS, f"{R}.multi_turn.enable=False"], "rollout.default_agent_loop", "single_turn_agent"),
        ([TOOLS], "rollout.default_agent_loop", "tool_agent"),
        ([P, f"{R}.response_length=${{rollout.prompt_length}}"], "rollout.response_length", 700),
        ([P, f"{R}.response_length=${{data.max_prompt_length}}"], "rollout.response_length", 700),
        (["trainer.test_freq=3"], "trainer.val_every", 3),
        (["data.train_files=a.parquet"], "data.train_files", ["a.parquet"]),
        (["reward_model.reward_manager=dapo"], "reward.batch", False),
        ([f"{BUFFER}.enable=True", f"{BUFFER}.len=64"], "algorithm.overlong_buffer", 64),
        ([GDPO, "algorithm.gdpo_reward_keys=[a,b]"], "algorithm.reward_parts", {"a": 1, "b": 1}),
        ([f"{F}.enable=True", f"{F}.max_num_gen_batches=10"], "algorithm.max_refills", 9),
        (["algorithm.rollout_correction.rollout_is=token"], "actor.correction.kind", "truncate"),
        (["algorithm.rollout_correction.rollout_rs=seq_mean_k1"], "actor.correction.level", "geometric"),
        (["custom_reward_function.path=a.py", "custom_reward_function.name=f"], "reward.function", "a.py:f"),
        (["trainer.total_epochs=3", "trainer.total_steps=7"], "trainer.total_epochs", None),
        (["async_training.staleness_threshold=0.5"], "trainer.mode", "async"),
    ],
)  # fmt: skip
def test_a_setting_of_verl_is_translated_on_the_command_line_of_train(
    overrides: list[str], setting: str, expected: Any
) -> None:
    value: Any = load_config(overrides=overrides)
    for part in setting.split("."):
        value = getattr(value, part)
    assert value == expected


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        (f"{A}.policy_loss.loss_mode=gpg", "register the loss with @policy_loss"),
        ("algorithm.adv_estimator=opo", "register the estimator with @advantage_estimator"),
        ("data.custom_cls.path=a.py", "as file.py:function"),
        ("actor_rollout_ref.model.override_config.tie_word_embeddings=False", "change config.json"),
        ("reward_model.enable=True", "use a judge"),
        ("trainer.device=npu", "input should be 'auto', 'cpu' or 'cuda'"),
        (f"{R}.name=trtllm", "set rollout.engine=vllm or sglang"),
        ("trainer.logger=[swanlab]", "input should be 'console', 'mlflow'"),
        ("reward.functon=1", "unknown key 'reward.functon'"),
    ],
)
def test_a_setting_without_a_counterpart_is_refused_with_a_remedy(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(overrides=[override])


@pytest.mark.parametrize(("num_rows", "steps"), [(64, 12), (79, 12), (10, 1)])
def test_epochs_are_counted_in_whole_batches(num_rows: int, steps: int) -> None:
    config = load_config(overrides=["trainer.total_epochs=3", "data.train_batch_size=16"])
    assert with_total_steps(config, num_rows=num_rows).trainer.total_steps == steps
    assert with_total_steps(load_config(), num_rows=num_rows).trainer.total_steps == 100


TOOLS_YAML = """
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


def gsm8k_row(number: int, *, interaction: bool) -> dict[str, Any]:
    truth = str(6 * number)
    kwargs = {"query": "6?", "ground_truth": truth, **({"name": "gsm8k"} if interaction else {})}
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is 6 * {number}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": number, "interaction_kwargs": kwargs},
    }


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("command", [GRPO_WITH_TOOL, GRPO_WITH_INTERACTION, PPO_BY_RULE])
def test_converted_arguments_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.yaml").write_text(TOOLS_YAML)
    (tmp_path / "interactions.yaml").write_text(INTERACTIONS)
    (tmp_path / "data").mkdir()
    for name, count in (("train", 8), ("test", 2)):
        rows = [gsm8k_row(number, interaction=command is GRPO_WITH_INTERACTION) for number in range(count)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / f"{name}.parquet")

    result = CliRunner().invoke(app, ["from-verl", *(COMMON + command).split(), "--out", "run.yaml"])
    assert result.exit_code == 0, result.output
    assert "not supported" not in result.output
    config = load_config("run.yaml")
    assert (config.trainer.total_epochs, config.actor.ppo_mini_batches) == (1, 2)
    trained = CliRunner().invoke(app, ["train", "run.yaml"])
    assert trained.exit_code == 0, trained.output
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = {line["step"]: line["reward/mean"] for line in metrics if "actor/grad_norm" in line}
    assert list(trained) == [1, 2]
    assert all(0 <= reward <= 1 for reward in trained.values())
