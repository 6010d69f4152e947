"""Table of verl's settings: what each of them is here.

`verl_names` applies the table to the keys of a file or a command line, and `agent-loop from-verl` reports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.config.verl.group import Group
from agent_loop.config.verl.rollout_keys import ROLLOUT_GROUPS
from agent_loop.config.verl.training_keys import TRAINING_GROUPS


@dataclass(frozen=True, slots=True)
class Rename:
    """A setting with another name here and the same values. Of a section, all keys in it."""

    target: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """A setting with other values here."""

    target: str
    values: Mapping[Any, Any]
    """Value here for each of verl's values."""
    others: str = ""
    """Advice in the error about any other value. Empty: other values are passed on unchanged."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A setting that has a single possible value here."""

    value: Any
    remedy: str = "remove the key"


@dataclass(frozen=True, slots=True)
class Unneeded:
    """A setting that has no effect here."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A setting without a counterpart. It is accepted if it is switched off."""

    remedy: str


Rule = Rename | Words | Fixed | Unneeded | Refused | Group

OFF: Sequence[Any] = (None, False, 0, -1, "", "null", "none", "None", "disable", "disabled", {}, [])
"""Values with which a refused setting is switched off."""

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_LAYOUT = Unneeded("training is sharded over trainer.num_processes with FSDP2, without options of its own")
_MEMORY = Unneeded("the trainer decides what to recompute and to offload")
_SPEED = Unneeded("it changes the speed in verl, and nothing else")
_MICRO = Unneeded("the reference model and old log-probs use actor.max_tokens_per_micro_batch")
_PROFILE = Unneeded("the time of each part of a step is among the metrics")
_STORED = Unneeded("every trajectory is stored in trainer.run_dir; see agent-loop view")
_ENGINE = Unneeded("the server decides")
_RAY = Unneeded("Ray is started with trainer.ray, if trainer.runtime is ray")
_COLUMN = Unneeded("columns are found by their contents")
_REWARD_MODEL = Refused("use a judge: reward.function is a YAML file with its questions (docs/rewards.md)")
_DATASET = Refused("name a function that returns rows in data.train_files, as file.py:function")
_LOSS = Unneeded("it belongs to a policy loss that is not selected")
_ASYNC = Unneeded("trainer.max_staleness is the single setting of trainer.mode=async")
_DISTILLATION = Refused(
    "set distillation.teachers, or actor.reference_path and actor.kl_loss_coef (docs/training.md)"
)
_WORKERS = Unneeded("rewards are computed by the workers of the rollout")


def _each(section: str, names: str, rule: Rule) -> dict[str, Rule]:
    """Return the same rule for several keys of a section."""
    return {f"{section}.{name}": rule for name in names.split()}


GROUPS: Sequence[Group] = (*TRAINING_GROUPS, *ROLLOUT_GROUPS)
"""Groups in the order in which they are translated."""

VERL_RULES: Mapping[str, Rule] = {
    "actor_rollout_ref": Unneeded("it describes verl's processes"),
    # model
    MODEL: Rename("model"),
    f"{MODEL}.enable_gradient_checkpointing": Rename("actor.gradient_checkpointing"),
    f"{MODEL}.use_remove_padding": Unneeded("actor.use_packing puts short rows together"),
    f"{MODEL}.lora.rank": Rename("model.lora_rank"),
    f"{MODEL}.lora.alpha": Rename("model.lora_alpha"),
    f"{MODEL}.lora.target_modules": Rename("model.target_modules"),
    f"{MODEL}.lora.type": Fixed("lora"),
    f"{MODEL}.lora": Unneeded("adapters are those of PEFT, with its defaults"),
    f"{MODEL}.lora_adapter_path": Refused("merge the adapter into the model, and set model.path"),
    f"{MODEL}.exclude_modules": Refused("select the modules with model.target_modules"),
    f"{MODEL}.custom_chat_template": Refused(
        "write the template to a file, and set model.chat_template_path"
    ),
    f"{MODEL}.external_lib": Refused("import it in a file of rollout.agent.loop_files"),
    f"{MODEL}.override_config": Refused("change config.json in the model's folder"),
    f"{MODEL}.mtp": Refused("train without multi-token prediction"),
    **_each(
        MODEL,
        "use_shm use_liger use_fused_kernels fused_kernel_options tiled_mlp hf_config_path "
        "enable_activation_offload tokenizer_config model_type _target_ torch_dtype",
        _SPEED,
    ),
    # actor
    ACTOR: Rename("actor"),
    f"{ACTOR}.optim.lr": Rename("actor.lr"),
    f"{ACTOR}.optim.weight_decay": Rename("actor.weight_decay"),
    f"{ACTOR}.optim.betas": Rename("actor.betas"),
    f"{ACTOR}.optim.clip_grad": Rename("actor.grad_clip"),
    f"{ACTOR}.optim": Unneeded("the optimiser is AdamW of torch, with its defaults"),
    f"{ACTOR}.use_prefix_grouper": Rename("actor.share_prefixes"),
    f"{ACTOR}.kl_loss_type": Words(
        "actor.kl_loss_type",
        {
            "kl": "k1",
            "mse": "k2",
            "low_var_kl": "k3",
            "k1+": "k2",
            "k3+": "k3",
            "kl+": "k2",
            "low_var_kl+": "k3",
        }
        | {name: name for name in ("k1", "k2", "k3")},
        "choose k2 or k3",
    ),
    f"{ACTOR}.use_rollout_log_probs": Words("actor.old_log_probs", {True: "rollout", False: "recompute"}),
    **_each(ACTOR, "clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef", _LOSS),
    f"{ACTOR}.policy_loss.tau_pos": Rename("actor.tau_pos"),
    f"{ACTOR}.policy_loss.tau_neg": Rename("actor.tau_neg"),
    f"{ACTOR}.policy_loss": _LOSS,
    f"{ACTOR}.freeze_vision_tower": Refused(
        "train the vision tower too, or select modules with model.lora_rank"
    ),
    f"{ACTOR}.router_replay": Refused("train without the replay of routers"),
    f"{ACTOR}.qat": Refused("train without quantisation"),
    f"{ACTOR}.fsdp_config.qat": Refused("train without quantisation"),
    **_each(
        ACTOR,
        "strategy fsdp_config megatron veomni torchtitan engine model_engine automodel "
        "ulysses_sequence_parallel_size use_torch_compile rollout_n nccl_timeout load_weight "
        "mindspeed fsdp",
        _LAYOUT,
    ),
    **_each(
        ACTOR,
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing "
        "recompute_old_log_prob use_fused_kernels pad_to_length use_remove_padding _target_ "
        "calculate_sum_pi_squared calculate_entropy log_prob_micro_batch_size_per_gpu "
        "log_prob_micro_batch_size",
        _MEMORY,
    ),
    f"{ACTOR}.checkpoint": Unneeded("a checkpoint holds all that resuming needs"),
    f"{ACTOR}.profiler": _PROFILE,
    f"{ACTOR}.profile": _PROFILE,
    f"{ACTOR}.shuffle": Unneeded("mini-batches are composed at random"),
    f"{ACTOR}.data_loader_seed": Unneeded("trainer.seed is the seed of the mini-batches"),
    # reference model
    "actor_rollout_ref.ref": _MICRO,
    "actor_rollout_ref.ref.model.path": Rename("actor.reference_path"),
    # rollout
    ROLLOUT: Rename("rollout"),
    f"{ROLLOUT}.val_kwargs": Rename("rollout.val"),
    f"{ROLLOUT}.do_sample": Fixed(True, "set rollout.temperature=0"),
    f"{ROLLOUT}.ignore_eos": Fixed(False),
    f"{ROLLOUT}.single_turn_response_length": Rename("rollout.multi_turn.max_turn_tokens"),
    f"{ROLLOUT}.dtype": Words(
        "model.dtype",
        {"bfloat16": "bfloat16", "float32": "float32", "auto": "auto", "bf16": "bfloat16"},
        "choose bfloat16 or float32",
    ),
    f"{ROLLOUT}.server": _ENGINE,
    f"{ROLLOUT}.sglang_rollout_mode": _ENGINE,
    f"{ROLLOUT}.mode": Unneeded("the servers are always asynchronous"),
    f"{ROLLOUT}.prometheus": Unneeded("rollout.metrics_port serves the metrics of the rollout"),
    f"{ROLLOUT}.quantization": Refused("serve the model without quantisation"),
    f"{ROLLOUT}.quantization_config_file": Refused("serve the model without quantisation"),
    f"{ROLLOUT}.enable_rollout_routing_replay": Refused("train without the replay of routers"),
    f"{ROLLOUT}.multi_turn.enable": Unneeded("the agent loop decides whether a row has several turns"),
    f"{ROLLOUT}.multi_turn.max_turns": Rename("rollout.multi_turn.max_assistant_turns"),
    f"{ROLLOUT}.multi_turn.max_tool_response_length": Rename(
        "rollout.multi_turn.max_tool_response_length", "it counts tokens here, and characters in verl"
    ),
    f"{ROLLOUT}.multi_turn.function_tool_path": Refused(
        "list the functions in rollout.multi_turn.tools, as file.py:name"
    ),
    f"{ROLLOUT}.multi_turn.completion_callback": Refused("write an agent loop (docs/how-to.md)"),
    f"{ROLLOUT}.agent.agent_loop_manager_class": Refused("leave it out: the manager is that of this package"),
    f"{ROLLOUT}.disaggregation": Refused("serve prefill and decoding together"),
    **_each(
        f"{ROLLOUT}.multi_turn",
        "use_inference_chat_template tokenization_sanity_check_mode num_repeat_rollouts stream "
        "use_xml_tool_parser enable_tokenization_sanity_check",
        Unneeded("tokens of earlier turns are never rendered again"),
    ),
    f"{ROLLOUT}.calculate_log_probs": Unneeded("the servers always return log-probs"),
    **_each(
        ROLLOUT,
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu micro_batch_size",
        _MICRO,
    ),
    **_each(
        ROLLOUT,
        "skip_tokenizer_init layered_summon multi_stage_wake_up enable_sleep_mode load_format "
        "checkpoint_engine logprobs_mode scheduling_policy full_determinism max_model_len "
        "enable_prefix_caching disable_log_stats cudagraph_capture_sizes limit_images mtp qat "
        "moe_load_balance_metrics_interval moe_tensor_parallel_size use_fire_sampling _target_ "
        "standalone_gpu_memory_utilization expert_parallel_size trust_remote_code update_weights "
        "update_weights_bucket_megabytes only",
        _ENGINE,
    ),
    f"{ROLLOUT}.profiler": _PROFILE,
    # critic
    **_each(
        "critic",
        "strategy enable fsdp fsdp_config megatron veomni torchtitan engine model optim forward_micro_batch_size "
        "forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu ulysses_sequence_parallel_size shuffle "
        "data_loader_seed checkpoint profiler rollout_n loss_scale_factor nccl_timeout load_weight",
        Unneeded("the critic is trained like the actor"),
    ),
    "critic.model.path": Rename("critic.path"),
    "critic.model.enable_gradient_checkpointing": Rename("critic.gradient_checkpointing"),
    "critic.optim.lr": Rename("critic.lr"),
    "critic.optim.weight_decay": Rename("critic.weight_decay"),
    "critic.optim.betas": Rename("critic.betas"),
    "critic.optim.clip_grad": Rename("critic.grad_clip"),
    "critic.cliprange_value": Rename("critic.clip_range_value"),
    # data
    "data.max_prompt_length": Rename("rollout.prompt_length"),
    "data.max_response_length": Rename("rollout.response_length"),
    "data.truncation": Words(
        "rollout.truncate_prompt",
        {"error": "no", "left": "left", "right": "right"},
        "choose error, left or right",
    ),
    "data.tokenizer": Rename("model.tokenizer_path"),
    "data.trust_remote_code": Rename("model.trust_remote_code"),
    "data.return_raw_chat": Fixed(True),
    "data.reward_fn_key": Fixed("data_source"),
    "data.filter_overlong_prompts": Unneeded(
        "the trajectory of a longer prompt ends at once, and is not trained"
    ),
    "data.custom_cls": _DATASET,
    "data.datagen": _DATASET,
    "data.sampler.class_name": Refused("choose a data.sampler, or register yours with @row_sampler"),
    "data.sampler.class_path": Refused("choose a data.sampler, or register yours with @row_sampler"),
    "data.train_max_samples": Refused("write fewer rows to data.train_files"),
    "data.apply_chat_template_kwargs": Refused("set the values in a template, and model.chat_template_path"),
    **_each(
        "data",
        "image_key video_key audio_key image_patch_size return_multi_modal_inputs mm_processor_kwargs "
        "return_raw_input_ids return_full_prompt process_image modality",
        _COLUMN,
    ),
    **_each(
        "data",
        "filter_overlong_prompts_workers dataloader_num_workers num_workers val_batch_size "
        "gen_batch_size validation_shuffle use_shm tool_config_path function_tool_path cache_dir "
        "filter_prompts",
        Unneeded("rows are read once, and batched by data.train_batch_size"),
    ),
    # reward
    "reward_model": Unneeded("it belongs to a reward model, which is not used"),
    "reward.reward_model": Unneeded("it belongs to a reward model, which is not used"),
    **_each(
        "reward",
        "reward_kwargs reward_manager custom_reward_function reward_loop_source reward_loop_module_path "
        "reward_loop_class_name",
        Unneeded("the reward function has its own settings"),
    ),
    "reward_model.enable": _REWARD_MODEL,
    "reward.reward_model.enable": _REWARD_MODEL,
    **{
        f"{section}.{name}": _WORKERS
        for section in ("reward_model", "reward")
        for name in ("num_workers", "launch_reward_fn_async", "use_reward_loop")
    },
    **{
        f"{section}": Unneeded("the rule for code runs it in a process of this machine")
        for section in ("sandbox_fusion", "reward_model.sandbox_fusion", "reward.sandbox_fusion")
    },
    "reward.reward_manager.source": Fixed("register", "write a reward.function"),
    "reward.reward_manager.module": Refused("write a reward.function"),
    # algorithm
    "algorithm.kl_penalty": Words(
        "algorithm.kl_reward_type",
        {"kl": "k1", "mse": "k2", "low_var_kl": "k3"} | {name: name for name in ("k1", "k2", "k3")},
        "choose kl, mse or low_var_kl",
    ),
    "algorithm.kl_ctrl": Unneeded("the weight of the penalty is fixed"),
    "algorithm.kl_ctrl.type": Fixed("fixed"),
    "algorithm.use_pf_ppo": Refused("train on all trajectories"),
    "algorithm.pf_ppo": Unneeded("it belongs to use_pf_ppo"),
    "algorithm._target_": _SPEED,
    # trainer
    "rollout.total_rollout_steps": Refused("set trainer.total_steps"),
    "rollout.test_freq": Refused("set trainer.val_every"),
    "trainer.default_local_dir": Rename("trainer.run_dir"),
    "trainer.critic_warmup": Rename("critic.head_start"),
    "trainer.max_ckpt_to_keep": Rename("trainer.keep_checkpoints"),
    "trainer.max_critic_ckpt_to_keep": Unneeded("checkpoints hold actor and critic"),
    "trainer.val_only": Refused("run agent-loop eval"),
    "trainer.resume_mode": Unneeded("agent-loop train resumes with --resume"),
    "trainer.resume_from_path": Unneeded("agent-loop train resumes with --resume-from PATH"),
    "trainer.default_hdfs_dir": Refused("copy trainer.run_dir"),
    "trainer.device": Words(
        "model.device",
        {"cuda": "auto", "gpu": "auto", "cpu": "cpu"},
        "train on a GPU of NVIDIA or on the CPU",
    ),
    "trainer.v1.trainer_mode": Words(
        "trainer.mode",
        {"sync": "sync", "colocate_async": "async", "separate_async": "async"},
        "choose sync, colocate_async or separate_async",
    ),
    "trainer.v1": _ASYNC,
    "trainer.use_v1": _ASYNC,
    "trainer.rl_logging_board_dir": _STORED,
    "trainer.tensorboard_dir": Unneeded("TensorBoard's files are in trainer.run_dir"),
    "trainer.log_val_generations": _STORED,
    "trainer.rollout_data_dir": _STORED,
    "trainer.validation_data_dir": _STORED,
    **_each(
        "trainer",
        "balance_batch use_legacy_worker_impl ray_wait_register_center_timeout esi_redundant_time "
        "del_local_ckpt_after_load worker_env debug log_freq profile_steps profile_continuous_steps "
        "npu_profile controller_nsight_options worker_nsight_options use_v1_trainer _target_",
        _SPEED,
    ),
    # further sections
    "async_training": _ASYNC,
    "async_resources": _LAYOUT,
    **_each(
        "distillation",
        "n_gpus_per_node nnodes teacher_models teacher_key distillation_loss teacher_model",
        Unneeded("it belongs to distillation.enabled"),
    ),
    "distillation.enabled": _DISTILLATION,
    "global_profiler": _PROFILE,
    "profiler": _PROFILE,
    "transfer_queue": Unneeded("batches are passed without a queue"),
    "skip": Unneeded("agent-loop replay runs recorded trajectories again"),
    "ray_kwargs": _RAY,
    "ray_init": _RAY,
    "hydra": Unneeded("it belongs to Hydra"),
    "defaults": Unneeded("it belongs to Hydra"),
    "model_engine": _LAYOUT,
    **{key: group for group in GROUPS for key in group.keys},
}
"""Rules of verl's keys. That of a section applies to its keys too, unless a longer name has one of its own."""

VERL_DEFAULTS: Mapping[str, Any] = {
    "data.train_batch_size": 1024,
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    "actor.old_log_probs": "recompute",
    f"{ROLLOUT}.val_kwargs.temperature": 0.0,
    "algorithm.adv_estimator": "gae",
    "algorithm.drop_zero_variance_groups": False,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "critic.optim.weight_decay": 0.01,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.logger": ["console", "wandb"],
    "trainer.default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.total_epochs": 30,
}
"""Defaults of verl that differ from those of this package. `agent-loop from-verl` writes those that a script leaves."""

GPU_DEFAULTS: Mapping[str, Any] = {
    f"{ROLLOUT}.dtype": "bfloat16",
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    "trainer.n_gpus_per_node": 8,
}
"""Further defaults of runs with vLLM or SGLang."""


def rule_of(key: str) -> tuple[str, Rule] | None:
    """Return the rule of a key, and the beginning of the key that has it; None if it has none."""
    parts = key.split(".")
    if parts[-1] == "_target_" or "@" in key:
        return key, VERL_RULES["hydra"]
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in VERL_RULES:
            return name, VERL_RULES[name]
    return None
