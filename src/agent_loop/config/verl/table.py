"""Table of verl's settings: key, what it is here, and a note."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

from agent_loop.config.verl import combined
from agent_loop.config.verl.combined import ACTOR, MODEL, REWARD_FUNCTIONS, ROLLOUT, Given


class Effect(Enum):
    """Effect of a key that sets nothing here."""

    NONE = auto()
    """The key is not needed. The note says why."""
    OTHER = auto()
    """The run differs from verl's. The note says what happens, and is logged when the settings are loaded."""


@dataclass(frozen=True, slots=True)
class Values:
    """A setting with other values here. Values that are not listed are the same."""

    target: str
    ours: Mapping[Any, Any]

    def of(self, value: Any) -> Any:
        """Return the value here of one of verl's values."""
        return next((ours for theirs, ours in self.ours.items() if theirs == value), value)


@dataclass(frozen=True, slots=True)
class Only:
    """A key that is accepted with these values, which set nothing. The note says what to do instead of others."""

    accepted: tuple[Any, ...]


Ours: TypeAlias = str | Values | Only | Effect | Callable[[Given], Mapping[str, Any]]
"""Setting here with the same values, of a section that of all its keys; or a function of several keys."""


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the table. That of a section applies to its keys too, unless a longer key has a row of its own."""

    key: str
    ours: Ours
    note: str = ""


OFF = Only((None, False, 0, -1, "", "null", "none", "None", "disable", "disabled", {}, []))
"""Without a counterpart. The key is accepted if it is switched off."""
LAYOUT = "training is sharded over trainer.num_processes with FSDP2, without options of its own"
MEMORY = "the trainer decides what to recompute and to offload"
SPEED = "it changes the speed in verl, and nothing else"
MICRO = "the reference model and old log-probs use actor.max_tokens_per_micro_batch"
PROFILE = "the time of each part of a step is among the metrics"
STORED = "every trajectory is stored in trainer.run_dir; see agent-loop view"
ENGINE = "the server decides"
RAY = "Ray is started with trainer.ray, if trainer.runtime is ray"
COLUMN = "columns are found by their contents"
ROWS = "rows are read once, and batched by data.train_batch_size"
RENDERED = "tokens of earlier turns are never rendered again"
ASYNC = "trainer.max_staleness is the single setting of trainer.mode=async"
JUDGE = "use a judge: reward.function is a YAML file with its questions (docs/rewards.md)"
DATASET = "name a function that returns rows in data.train_files, as file.py:function"
SAMPLER = "choose a data.sampler, or register yours with @row_sampler"
NO_REPLAY = "train without the replay of routers"
NO_QUANTIZATION = "train and serve the model without quantisation"
NO_MODEL = "it belongs to a model that is not used"
HYDRA = "it belongs to Hydra"
NEVER = {-1: None, 0: None}
KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "k1+": "k2", "k3+": "k3", "kl+": "k2", "low_var_kl+": "k3"}


def _rows(section: str, names: str, ours: Ours, note: str = "") -> Iterator[Row]:
    """Yield a row for each of several keys of a section. A section "" is the whole configuration."""
    return (Row(f"{section}.{name}" if section else name, ours, note) for name in names.split())


_ROWS = (
    Row("actor_rollout_ref", Effect.NONE, "it describes verl's processes"),
    # model
    Row(MODEL, "model"),
    Row(f"{MODEL}.enable_gradient_checkpointing", "actor.gradient_checkpointing"),
    Row(f"{MODEL}.use_remove_padding", Effect.NONE, "actor.use_packing puts short rows together"),
    Row(f"{MODEL}.lora", Effect.NONE, "adapters are those of PEFT, with its defaults"),
    *_rows(
        MODEL,
        "lora_rank lora_alpha target_modules lora.rank lora.alpha lora.target_modules",
        combined.adapters,
    ),
    Row(f"{MODEL}.lora.type", Only(("lora", None)), "remove the key"),
    Row(f"{MODEL}.lora_adapter_path", OFF, "merge the adapter into the model, and set model.path"),
    Row(f"{MODEL}.exclude_modules", OFF, "select the modules with model.target_modules"),
    Row(
        f"{MODEL}.custom_chat_template", OFF, "write the template to a file, and set model.chat_template_path"
    ),
    Row(f"{MODEL}.external_lib", OFF, "import it in a file of rollout.agent.loop_files"),
    Row(f"{MODEL}.override_config", Only((None, {})), "change config.json in the model's folder"),
    Row(f"{MODEL}.override_config.attn_implementation", Effect.NONE, SPEED),
    Row(f"{MODEL}.override_config.moe_config", OFF, "train all experts and routers"),
    Row(f"{MODEL}.mtp", Effect.NONE, "it belongs to multi-token prediction"),
    Row(f"{MODEL}.mtp.enable", OFF, "train without multi-token prediction"),
    *_rows(
        MODEL,
        "use_shm use_liger use_fused_kernels fused_kernel_options tiled_mlp hf_config_path "
        "enable_activation_offload tokenizer_config model_type torch_dtype",
        Effect.NONE,
        SPEED,
    ),
    # rollout
    Row(ROLLOUT, "rollout"),
    Row(f"{ROLLOUT}.name", combined.engine, "hf and naive are the embedded engine"),
    Row(f"{ROLLOUT}.val_kwargs", "rollout.val"),
    *_rows(f"{ROLLOUT}.val_kwargs", "do_sample temperature", combined.val_sampling),
    Row(f"{ROLLOUT}.do_sample", Only((True,)), "set rollout.temperature=0"),
    Row(f"{ROLLOUT}.ignore_eos", Only((False,)), "remove the key"),
    Row(f"{ROLLOUT}.single_turn_response_length", "rollout.multi_turn.max_turn_tokens"),
    Row(f"{ROLLOUT}.dtype", Values("model.dtype", {"bf16": "bfloat16"})),
    Row(f"{ROLLOUT}.mode", Only(("async", None)), "remove the key: the servers are always asynchronous"),
    Row(f"{ROLLOUT}.prometheus", Effect.NONE, "rollout.metrics_port serves the metrics of the rollout"),
    *_rows(ROLLOUT, "quantization quantization_config_file qat.enable", OFF, NO_QUANTIZATION),
    Row(f"{ROLLOUT}.enable_rollout_routing_replay", OFF, NO_REPLAY),
    Row(f"{ROLLOUT}.multi_turn.enable", combined.multi_turn, "rows may name another agent loop"),
    Row(f"{ROLLOUT}.multi_turn.max_turns", "rollout.multi_turn.max_assistant_turns"),
    Row(
        f"{ROLLOUT}.multi_turn.max_tool_response_length",
        "rollout.multi_turn.max_tool_response_length",
        "it counts tokens here, and characters in verl",
    ),
    Row(
        f"{ROLLOUT}.multi_turn.function_tool_path",
        OFF,
        "list the functions in rollout.multi_turn.tools, as file.py:name",
    ),
    Row(f"{ROLLOUT}.multi_turn.completion_callback", OFF, "write an agent loop (docs/how-to.md)"),
    Row(
        f"{ROLLOUT}.agent.agent_loop_manager_class", OFF, "leave it out: the manager is that of this package"
    ),
    *_rows(f"{ROLLOUT}.agent.custom_async_server", "path name", combined.custom_server),
    Row(f"{ROLLOUT}.disaggregation", Effect.NONE, "prefill and decoding are served together"),
    Row(f"{ROLLOUT}.disaggregation.enabled", OFF, "serve prefill and decoding together"),
    *_rows(
        f"{ROLLOUT}.multi_turn",
        "use_inference_chat_template tokenization_sanity_check_mode num_repeat_rollouts stream "
        "use_xml_tool_parser enable_tokenization_sanity_check",
        Effect.NONE,
        RENDERED,
    ),
    Row(f"{ROLLOUT}.calculate_log_probs", Effect.NONE, "the servers always return log-probs"),
    Row(f"{ROLLOUT}.over_sample_rate", combined.over_sample),
    *_rows(
        ROLLOUT,
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu micro_batch_size",
        Effect.NONE,
        MICRO,
    ),
    *_rows(
        ROLLOUT,
        "skip_tokenizer_init layered_summon multi_stage_wake_up enable_sleep_mode load_format "
        "checkpoint_engine logprobs_mode scheduling_policy full_determinism max_model_len "
        "enable_prefix_caching disable_log_stats cudagraph_capture_sizes limit_images mtp qat server "
        "moe_load_balance_metrics_interval moe_tensor_parallel_size use_fire_sampling sglang_rollout_mode "
        "standalone_gpu_memory_utilization expert_parallel_size trust_remote_code update_weights "
        "update_weights_bucket_megabytes only router_config_path",
        Effect.NONE,
        ENGINE,
    ),
    Row(f"{ROLLOUT}.profiler", Effect.NONE, PROFILE),
    *_rows(
        ROLLOUT,
        " ".join((*combined.ENGINE_OPTIONS, *(f"engine_kwargs.{name}" for name in combined.ENGINES))),
        combined.engine_options,
        "under the engine's own name",
    ),
    Row(f"{ROLLOUT}.engine_kwargs.trtllm", Effect.NONE, "its engine is not used"),
    # algorithm
    Row("algorithm.adv_estimator", combined.estimator),
    Row(
        "algorithm.kl_penalty",
        Values("algorithm.kl_reward_type", {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}),
    ),
    *_rows("algorithm", "use_kl_in_reward kl_ctrl.kl_coef", combined.kl_reward),
    Row("algorithm.kl_ctrl", Effect.NONE, "the weight of the penalty is fixed"),
    Row("algorithm.kl_ctrl.type", Only(("fixed",)), "remove the key"),
    *_rows("algorithm", "gdpo_reward_keys gdpo_reward_weights", combined.gdpo),
    *_rows(
        "algorithm.filter_groups",
        "enable metric max_num_gen_batches max_inflight_gen_batches",
        combined.filter_groups,
    ),
    *_rows("", combined.CORRECTION_KEYS, combined.correction),
    *_rows(
        combined.CORRECTION,
        "rollout_is rollout_is_threshold rollout_rs rollout_rs_threshold bypass_mode loss_type",
        combined.correction,
    ),
    Row("algorithm.use_pf_ppo", OFF, "train on all trajectories"),
    Row("algorithm.pf_ppo", Effect.NONE, "it belongs to use_pf_ppo"),
    # trainer
    Row("trainer.default_local_dir", "trainer.run_dir"),
    Row("trainer.total_training_steps", Values("trainer.total_steps", NEVER)),
    Row("trainer.total_epochs", "trainer.total_epochs"),
    Row("trainer.save_freq", Values("trainer.save_every", NEVER)),
    Row("trainer.test_freq", Values("trainer.val_every", NEVER)),
    Row("trainer.critic_warmup", "critic.head_start"),
    *_rows("trainer", "max_ckpt_to_keep max_actor_ckpt_to_keep", Values("trainer.keep_checkpoints", NEVER)),
    Row("trainer.max_critic_ckpt_to_keep", Effect.NONE, "checkpoints hold actor and critic"),
    Row("trainer.logger", combined.loggers, "metrics.jsonl is always written"),
    Row("trainer.val_only", OFF, "run agent-loop eval"),
    Row("trainer.resume_mode", Effect.NONE, "agent-loop train resumes with --resume"),
    Row("trainer.resume_from_path", Effect.OTHER, "agent-loop train resumes with --resume-from PATH"),
    Row("trainer.default_hdfs_dir", OFF, "copy trainer.run_dir"),
    Row("trainer.checkpoint_callback_class", OFF, "read trainer.run_dir"),
    Row("trainer.device", Values("model.device", {"cuda": "auto", "gpu": "auto"})),
    Row(
        "trainer.v1.trainer_mode",
        Values("trainer.mode", {"colocate_async": "async", "separate_async": "async"}),
    ),
    *_rows("trainer", "v1 use_v1", Effect.NONE, ASYNC),
    *_rows("async_training", "staleness_threshold trigger_parameter_sync_step", combined.asynchronous),
    *_rows("trainer", "n_gpus_per_node nnodes", combined.machines),
    *_rows(ROLLOUT, "data_parallel_size nnodes n_gpus_per_node", combined.machines),
    *_rows("rollout", "nnodes n_gpus_per_node", combined.machines),
    Row("trainer.tensorboard_dir", Effect.NONE, "TensorBoard's files are in trainer.run_dir"),
    *_rows(
        "trainer",
        "rl_logging_board_dir log_val_generations rollout_data_dir validation_data_dir",
        Effect.NONE,
        STORED,
    ),
    *_rows(
        "trainer",
        "balance_batch use_legacy_worker_impl ray_wait_register_center_timeout esi_redundant_time "
        "del_local_ckpt_after_load worker_env debug log_freq profile_steps profile_continuous_steps "
        "npu_profile controller_nsight_options worker_nsight_options use_v1_trainer",
        Effect.NONE,
        SPEED,
    ),
    Row("rollout.total_rollout_steps", OFF, "set trainer.total_steps"),
    Row("rollout.test_freq", OFF, "set trainer.val_every"),
    # data
    Row("data.max_prompt_length", "rollout.prompt_length"),
    Row("data.max_response_length", "rollout.response_length"),
    Row("data.truncation", Values("rollout.truncate_prompt", {"error": "no"})),
    Row("data.tokenizer", "model.tokenizer_path"),
    Row("data.trust_remote_code", Effect.OTHER, "model.trust_remote_code decides"),
    *_rows("data", "train_batch_size", combined.batch_size),
    Row("async_training.require_batches", combined.batch_size),
    *(Row(f"data.{name}", f"data.{name}") for name in ("train_files", "val_files", "seed")),
    Row("data.val_max_samples", Values("data.val_max_rows", NEVER)),
    Row("data.return_raw_chat", Only((True,)), "remove the key"),
    Row("data.reward_fn_key", Only(("data_source",)), "name the column data_source"),
    Row(
        "data.filter_overlong_prompts",
        Effect.OTHER,
        "rows with longer prompts stay: their trajectories end at once, and are not trained",
    ),
    *_rows("data", "custom_cls datagen", Effect.NONE, "it belongs to a path that is not given"),
    *_rows("data", "custom_cls.path datagen.path", OFF, DATASET),
    *_rows("data.sampler", "class_name class_path", OFF, SAMPLER),
    Row("data.train_max_samples", OFF, "write fewer rows to data.train_files"),
    Row("data.apply_chat_template_kwargs", "model.chat_template_kwargs"),
    *_rows(
        "data",
        "image_key video_key audio_key image_patch_size return_multi_modal_inputs mm_processor_kwargs "
        "return_raw_input_ids return_full_prompt process_image modality",
        Effect.NONE,
        COLUMN,
    ),
    *_rows(
        "data",
        "filter_overlong_prompts_workers dataloader_num_workers num_workers val_batch_size "
        "gen_batch_size validation_shuffle use_shm tool_config_path function_tool_path cache_dir "
        "filter_prompts",
        Effect.NONE,
        ROWS,
    ),
    # actor
    Row(ACTOR, "actor"),
    Row(f"{ACTOR}.optim", Effect.NONE, "the optimiser is AdamW of torch, with its defaults"),
    Row(f"{ACTOR}.optim.lr", "actor.lr"),
    Row(f"{ACTOR}.optim.weight_decay", "actor.weight_decay"),
    Row(f"{ACTOR}.optim.betas", "actor.betas"),
    *_rows(ACTOR, "optim.clip_grad grad_clip", combined.actor_grad_clip),
    *_rows(f"{ACTOR}.optim", combined.SCHEDULE_KEYS, combined.actor_schedule),
    Row(f"{ACTOR}.ppo_mini_batch_size", combined.actor_mini_batches, "a number of mini-batches"),
    *_rows(ACTOR, combined.MICRO_BATCH_KEYS, combined.actor_micro_batches),
    *_rows(ACTOR, "clip_ratio clip_ratio_low clip_ratio_high", combined.clip),
    *_rows(ACTOR, "use_kl_loss kl_loss_coef", combined.kl_loss),
    *_rows(ACTOR, "policy_loss.loss_mode loss_mode", combined.loss),
    *_rows(ACTOR, "loss_agg_mode loss_scale_factor", combined.aggregation),
    Row(f"{ACTOR}.use_prefix_grouper", "actor.share_prefixes"),
    Row(f"{ACTOR}.kl_loss_type", Values("actor.kl_loss_type", KL)),
    Row(
        f"{ACTOR}.use_rollout_log_probs", Values("actor.old_log_probs", {True: "rollout", False: "recompute"})
    ),
    Row(f"{ACTOR}.policy_loss.tau_pos", "actor.tau_pos"),
    Row(f"{ACTOR}.policy_loss.tau_neg", "actor.tau_neg"),
    *_rows(
        ACTOR,
        "policy_loss clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef",
        Effect.NONE,
        "it belongs to a policy loss that is not selected",
    ),
    Row(f"{ACTOR}.freeze_vision_tower", OFF, "train the vision tower too, or set model.lora_rank"),
    Row(f"{ACTOR}.router_replay", Effect.NONE, "it belongs to the replay of routers"),
    Row(f"{ACTOR}.router_replay.mode", Only(("disabled", None)), NO_REPLAY),
    *_rows(ACTOR, "qat.enable fsdp_config.qat.enable", OFF, NO_QUANTIZATION),
    *_rows(
        ACTOR,
        "strategy fsdp_config megatron veomni torchtitan engine model_engine automodel qat "
        "ulysses_sequence_parallel_size use_torch_compile rollout_n nccl_timeout load_weight "
        "mindspeed fsdp",
        Effect.NONE,
        LAYOUT,
    ),
    *_rows(
        ACTOR,
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing "
        "recompute_old_log_prob use_fused_kernels pad_to_length use_remove_padding "
        "calculate_sum_pi_squared calculate_entropy log_prob_micro_batch_size_per_gpu "
        "log_prob_micro_batch_size",
        Effect.NONE,
        MEMORY,
    ),
    Row(f"{ACTOR}.checkpoint", Effect.NONE, "a checkpoint holds all that resuming needs"),
    *_rows(ACTOR, "profiler profile", Effect.NONE, PROFILE),
    Row(f"{ACTOR}.shuffle", Effect.NONE, "mini-batches are composed at random"),
    Row(f"{ACTOR}.data_loader_seed", Effect.NONE, "trainer.seed is the seed of the mini-batches"),
    Row("actor_rollout_ref.ref", Effect.NONE, MICRO),
    Row("actor_rollout_ref.ref.model.path", "actor.reference_path"),
    # critic
    Row("critic.model.path", "critic.path"),
    Row("critic.model.enable_gradient_checkpointing", "critic.gradient_checkpointing"),
    Row("critic.optim.lr", "critic.lr"),
    Row("critic.optim.weight_decay", "critic.weight_decay"),
    Row("critic.optim.betas", "critic.betas"),
    *_rows("critic", "optim.clip_grad grad_clip", combined.critic_grad_clip),
    Row("critic.cliprange_value", "critic.clip_range_value"),
    *_rows("critic.optim", combined.SCHEDULE_KEYS, combined.critic_schedule),
    Row("critic.ppo_mini_batch_size", combined.critic_mini_batches, "a number of mini-batches"),
    *_rows("critic", combined.MICRO_BATCH_KEYS, combined.critic_micro_batches),
    *_rows(
        "critic",
        "strategy enable fsdp fsdp_config megatron veomni torchtitan engine model optim forward_micro_batch_size "
        "forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu ulysses_sequence_parallel_size shuffle "
        "data_loader_seed checkpoint profiler rollout_n loss_scale_factor nccl_timeout load_weight",
        Effect.NONE,
        "the critic is trained like the actor",
    ),
    # reward
    *_rows(
        "",
        " ".join(
            f"{section}.{name}" for section in REWARD_FUNCTIONS for name in ("path", "name", "reward_kwargs")
        ),
        combined.reward_function,
    ),
    *_rows("", "reward_model.reward_manager reward.reward_manager.name", combined.reward_manager),
    *_rows("", "reward_model reward.reward_model", Effect.NONE, NO_MODEL),
    *_rows("", "reward_model.enable reward.reward_model.enable", OFF, JUDGE),
    *_rows(
        "",
        " ".join(
            f"{s}.{name}" for s in combined.OVERLONG for name in ("enable", "len", "penalty_factor", "log")
        ),
        combined.overlong,
    ),
    *_rows(
        "reward",
        "reward_kwargs reward_manager custom_reward_function reward_loop_source reward_loop_module_path "
        "reward_loop_class_name",
        Effect.NONE,
        "the reward function has its own settings",
    ),
    *(
        Row(f"{section}.{name}", Effect.NONE, "rewards are computed by the workers of the rollout")
        for section in ("reward_model", "reward")
        for name in ("num_workers", "launch_reward_fn_async", "use_reward_loop")
    ),
    *_rows(
        "",
        "sandbox_fusion reward_model.sandbox_fusion reward.sandbox_fusion",
        Effect.NONE,
        "the rule for code runs it in a process of this machine",
    ),
    Row("reward.reward_manager.source", Only(("register",)), "write a reward.function"),
    Row("reward.reward_manager.module.path", OFF, "write a reward.function"),
    # further sections
    Row("async_training", Effect.NONE, ASYNC),
    *_rows("", "async_resources model_engine", Effect.NONE, LAYOUT),
    *_rows(
        "distillation",
        "n_gpus_per_node nnodes teacher_models teacher_key distillation_loss teacher_model",
        Effect.NONE,
        NO_MODEL,
    ),
    Row(
        "distillation.enabled",
        OFF,
        "set distillation.teachers, or actor.reference_path and actor.kl_loss_coef (docs/training.md)",
    ),
    *_rows("", "global_profiler profiler", Effect.NONE, PROFILE),
    Row("transfer_queue", Effect.NONE, "batches are passed without a queue"),
    Row("skip", Effect.NONE, "agent-loop replay runs recorded trajectories again"),
    *_rows("", "ray_kwargs ray_init", Effect.NONE, RAY),
    *_rows("", "hydra defaults", Effect.NONE, HYDRA),
)

TABLE: Mapping[str, Row] = {row.key: row for row in _ROWS}

VERL_DEFAULTS: Mapping[str, Any] = {
    "data.train_batch_size": 1024,
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.use_kl_loss": False,
    "actor.old_log_probs": "recompute",
    f"{ROLLOUT}.val_kwargs.temperature": 0.0,
    "algorithm.adv_estimator": "gae",
    "algorithm.drop_zero_variance_groups": False,
    "algorithm.use_kl_in_reward": False,
    "critic.optim.weight_decay": 0.01,
    "reward.function": "agent_loop.integrations.verl.rules:default_compute_score",
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.logger": ["console", "wandb"],
    "trainer.default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.total_epochs": 30,
}
"""Defaults of verl that differ from those of this package. `agent-loop from-verl` writes those that are not given."""

GPU_DEFAULTS: Mapping[str, Any] = {
    f"{ROLLOUT}.dtype": "bfloat16",
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    "trainer.n_gpus_per_node": 8,
}
"""Further defaults of runs with vLLM or SGLang."""


def row_of(key: str) -> Row | None:
    """Return the row of a key, or that of the section that it is in; None if there is none."""
    if key.endswith("_target_") or "@" in key:
        return TABLE["hydra"]
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((TABLE[name] for name in names if name in TABLE), None)
