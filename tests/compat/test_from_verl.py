"""`agent-loop from-verl`, and verl's settings on the command line of `agent-loop train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.config import Config, load_config
from agent_loop.config.verl.conversion import Conversion, convert
from agent_loop.config.verl.launch import read_launches
from agent_loop.config.verl.translation import KeyReport
from agent_loop.errors import ConfigError
from agent_loop.training.epochs import with_total_steps

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

F, GDPO = "algorithm.filter_groups", "algorithm.adv_estimator=gdpo"

SCRIPT = """
set -xeuo pipefail
export VLLM_USE_V1=1
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
prompt=1024
response=$((1024 * 3))
NGPUS=${NGPUS:-8}
pip install -U something
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
    trainer.n_gpus_per_node=$NGPUS trainer.nnodes=1 \\
    trainer.save_freq=-1 trainer.test_freq=5 \\
    trainer.resume_mode=auto \\
    data.custom_cls.path=mine.py \\
    trainer.total_epochs=15 $@ 2>&1 | tee log.txt
"""


def write(folder: Path, text: str, *, name: str = "run_grpo.sh") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def converted(path: Path, *arguments: str) -> Conversion:
    [launch] = read_launches(path, arguments=arguments, environment={"HOME": "/home/u", "PWD": "/work"})
    return convert(launch)


def by_key(reports: Any) -> Mapping[str, KeyReport]:
    return {report.key: report for report in reports}


def train_config(*overrides: str) -> Config:
    """Return the configuration of `agent-loop train` with these settings on its command line."""
    return load_config(overrides=overrides)


def test_a_launch_script_becomes_a_configuration_that_loads(tmp_path: Path) -> None:
    script, target = write(tmp_path, SCRIPT), tmp_path / "config.yaml"
    result = CliRunner().invoke(
        app, ["from-verl", str(script), "trainer.test_freq=7", "--out", str(target)], env={"HOME": "/home/u"}
    )
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
    assert config.rollout.agent.default_agent_loop == "tool_agent"
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
    assert "data.custom_cls.path is 'mine.py', which is not supported; name a function" in result.output
    assert "actor_rollout_ref.ref.fsdp_config.param_offload=True: the reference model" in result.output
    assert f"agent-loop train {target} --resume" in result.output


def test_every_key_is_reported_with_what_became_of_it(tmp_path: Path) -> None:
    reports = by_key(converted(write(tmp_path, SCRIPT)).reports)
    statuses = {
        "data.train_batch_size": "same",
        "trainer.total_epochs": "same",
        f"{R}.n": "renamed",
        f"{A}.optim.lr": "renamed",
        f"{A}.ppo_mini_batch_size": "translated",
        "data.train_files": "same",
        "data.val_files": "translated",
        "trainer.save_freq": "translated",
        "data.filter_overlong_prompts": "not needed",
        f"{A}.fsdp_config.param_offload": "not needed",
        "trainer.resume_mode": "not needed",
        "data.custom_cls.path": "not supported",
    }
    assert {key: reports[key].status for key in statuses} == statuses
    assert all(r.note for r in reports.values() if r.status in ("not needed", "not supported"))
    assert "unknown" not in {report.status for report in reports.values()}


def test_a_key_of_nobody_is_reported_as_unknown(tmp_path: Path) -> None:
    script = write(tmp_path, "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.mistake=1")
    assert by_key(converted(script).reports)["data.mistake"].status == "unknown"
    recipe = write(tmp_path, "python -m recipe.mine.main data.mistake=1 actor_rollout_ref.model.path=m")
    report = by_key(converted(recipe).reports)["data.mistake"]
    assert (report.status, "only recipe.mine.main reads it" in report.note) == ("not supported", True)


def test_without_a_function_of_its_own_a_run_is_scored_by_the_rules(tmp_path: Path) -> None:
    script = write(tmp_path, "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m")
    function = converted(script).settings["reward"]["function"]
    assert function == "agent_loop.integrations.verl.rules:default_compute_score"


def test_the_configuration_that_a_command_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    named = """
hydra: {searchpath: ["file://verl/trainer/config"]}
defaults: [ppo_trainer, _self_]
data: {max_response_length: 512}
actor_rollout_ref:
  rollout: {name: sglang, response_length: "${data.max_response_length}", multi_turn: {max_assistant_turns: 5}}
"""
    write(tmp_path / "config", named, name="multiturn.yaml")
    (tmp_path / "scripts").mkdir()
    script = write(
        tmp_path / "scripts",
        'python3 -m verl.trainer.main_ppo --config-path="$PWD/config" --config-name=multiturn '
        "data.max_response_length=99 actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    )
    rollout = converted(script).settings["rollout"]
    assert (rollout["engine"], rollout["response_length"]) == ("sglang", 99)
    assert rollout["multi_turn"]["max_assistant_turns"] == 5
    (tmp_path / "config" / "multiturn.yaml").unlink()
    assert any("'multiturn' in '/work/config' was not found" in note for note in converted(script).notes)


def test_a_configuration_of_verl_is_converted_like_a_script(tmp_path: Path) -> None:
    text = """
actor_rollout_ref:
  model: {path: m, lora_rank: 8}
  actor: {ppo_mini_batch_size: 32, strategy: fsdp2, _target_: verl.workers.config.FSDPActorConfig}
  rollout: {name: vllm, prompt_length: "${oc.select:data.max_prompt_length,512}", n: 4}
data: {train_batch_size: 64, max_prompt_length: 700, seed: null}
trainer: {total_training_steps: null, total_epochs: 2, device: cpu}
"""
    path = write(tmp_path, text, name="config.yaml")
    settings = converted(path, "trainer.n_gpus_per_node=1").settings
    assert (settings["rollout"]["prompt_length"], settings["actor"]["ppo_mini_batches"]) == (700, 2)
    assert settings["model"]["lora_rank"] == 8
    assert "seed" not in settings["data"]
    assert "total_steps" not in settings["trainer"]


def test_a_script_with_several_starts_converts_the_chosen_one(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "for n in 4 8; do\n python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m "
        "actor_rollout_ref.rollout.n=$n\ndone\n",
    )
    out = tmp_path / "second.yaml"
    result = CliRunner().invoke(app, ["from-verl", str(script), "--command", "2", "--out", str(out)])
    assert "starts the trainer 2 times" in result.output
    assert load_config(out).rollout.n == 8


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.sh", "ls; python train.py", "does not start verl's trainer.*it runs 'ls, python'"),
        ("a.sh", "torchrun -m verl.trainer.sft_trainer data.train_files=a model.path=m", "agent-loop sft"),
        ("a.sh", "python -m verl.trainer.main_generation data.path=a model.path=m", "agent-loop rollout"),
        ("a.sh", "echo 'a", "not closed"),
        ("a.yaml", "rollout: {n: 3}", "not a configuration of verl"),
    ],
)
def test_what_is_not_a_command_of_verl_is_refused(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_launches(write(tmp_path, text, name=name), environment={})
    with pytest.raises(ConfigError, match="does not exist"):
        read_launches(tmp_path / "missing.sh", environment={})


def test_a_file_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    script = write(tmp_path, "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m")
    out = write(tmp_path, "kept", name="out.yaml")
    command = ["from-verl", str(script), "--out", str(out)]
    assert isinstance(CliRunner().invoke(app, command).exception, ConfigError)
    assert out.read_text() == "kept"
    assert CliRunner().invoke(app, [*command, "--overwrite"]).exit_code == 0


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
        (["trainer.test_freq=3"], "trainer.val_every", 3),
        (["data.train_files=a.parquet"], "data.train_files", ["a.parquet"]),
        (["reward_model.reward_manager=dapo"], "reward.batch", False),
        (
            ["reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=64"],
            "algorithm.overlong_buffer",
            64,
        ),
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
    value: Any = train_config(*overrides)
    for part in setting.split("."):
        value = getattr(value, part)
    assert value == expected


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        (f"{A}.policy_loss.loss_mode=gpg", "register the loss with @policy_loss"),
        ("algorithm.adv_estimator=opo", "register the estimator with @advantage_estimator"),
        ("data.custom_cls.path=a.py", "as file.py:function"),
        ("reward_model.enable=True", "use a judge"),
        ("trainer.device=npu", "a GPU of NVIDIA or on the CPU"),
        (f"{R}.name=trtllm", "set rollout.engine=vllm or sglang"),
        ("trainer.logger=[swanlab]", "choose among console, mlflow"),
        ("critic.lrr=1", "unknown key 'critic.lrr'"),
        ("reward.functon=1", "unknown key 'reward.functon'"),
    ],
)
def test_a_setting_without_a_counterpart_is_refused_with_a_remedy(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        train_config(override)


@pytest.mark.parametrize(("num_rows", "steps"), [(64, 12), (79, 12), (10, 1)])
def test_epochs_are_counted_in_whole_batches(num_rows: int, steps: int) -> None:
    config = train_config("trainer.total_epochs=3", "data.train_batch_size=16")
    assert with_total_steps(config, num_rows=num_rows).trainer.total_steps == steps
    assert with_total_steps(train_config(), num_rows=num_rows).trainer.total_steps == 100
