"""Table of verl's settings: key, what it is here, and a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent_loop.config.verl.combined import ACTOR, MODEL, ROLLOUT
from agent_loop.config.verl.rows import COMBINED, Effect, Only, Row, Values, rows

OFF = Only((None, False, 0, -1, "", "null", "none", "None", "disable", "disabled", {}, []))
"""Without a counterpart. The key is accepted if it is switched off."""
NEVER = {-1: None, 0: None}
KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "k1+": "k2", "k3+": "k3", "kl+": "k2", "low_var_kl+": "k3"}

NOT_NEEDED: Mapping[str, Mapping[str, str]] = {
    "it describes verl's processes, or changes its speed": {
        MODEL: "override_config.attn_implementation use_shm use_liger use_fused_kernels fused_kernel_options "
        "tiled_mlp hf_config_path enable_activation_offload tokenizer_config model_type torch_dtype lora "
        "use_remove_padding",
        "trainer": "balance_batch use_legacy_worker_impl ray_wait_register_center_timeout esi_redundant_time "
        "del_local_ckpt_after_load worker_env debug log_freq use_v1_trainer v1 use_v1",
        "": "actor_rollout_ref async_resources async_training model_engine transfer_queue ray_kwargs ray_init",
    },
    "it belongs to a part that is not used": {
        "": "algorithm.pf_ppo reward_model sandbox_fusion skip",
        MODEL: "mtp",
        ROLLOUT: "disaggregation engine_kwargs.trtllm",
        ACTOR: "policy_loss clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef router_replay",
        "data": "custom_cls datagen",
        "reward": "reward_model sandbox_fusion",
        "reward_model": "sandbox_fusion",
        "distillation": "n_gpus_per_node nnodes teacher_models teacher_key distillation_loss teacher_model",
    },
    "metrics, times and trajectories are always in trainer.run_dir; see agent-loop view": {
        "": "global_profiler profiler",
        ROLLOUT: "prometheus profiler",
        ACTOR: "profiler profile",
        "trainer": "tensorboard_dir rl_logging_board_dir log_val_generations rollout_data_dir "
        "validation_data_dir profile_steps profile_continuous_steps npu_profile controller_nsight_options "
        "worker_nsight_options",
    },
    "tokens of earlier turns are never rendered again": {
        ROLLOUT: "multi_turn.use_inference_chat_template multi_turn.tokenization_sanity_check_mode "
        "multi_turn.num_repeat_rollouts multi_turn.stream multi_turn.use_xml_tool_parser "
        "multi_turn.enable_tokenization_sanity_check"
    },
    "the reference model and old log-probs use actor.max_tokens_per_micro_batch": {
        "": "actor_rollout_ref.ref",
        ROLLOUT: "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu micro_batch_size",
    },
    "the server decides, and always returns log-probs": {
        ROLLOUT: "skip_tokenizer_init layered_summon multi_stage_wake_up enable_sleep_mode load_format "
        "checkpoint_engine logprobs_mode scheduling_policy full_determinism max_model_len "
        "enable_prefix_caching disable_log_stats cudagraph_capture_sizes limit_images mtp qat server "
        "moe_load_balance_metrics_interval moe_tensor_parallel_size use_fire_sampling "
        "sglang_rollout_mode standalone_gpu_memory_utilization expert_parallel_size trust_remote_code "
        "update_weights update_weights_bucket_megabytes only router_config_path calculate_log_probs"
    },
    "rows are read once, and columns are found by their contents": {
        "data": "filter_overlong_prompts_workers dataloader_num_workers num_workers val_batch_size "
        "gen_batch_size validation_shuffle use_shm tool_config_path function_tool_path cache_dir "
        "filter_prompts image_key video_key audio_key image_patch_size return_multi_modal_inputs "
        "mm_processor_kwargs return_raw_input_ids return_full_prompt process_image modality"
    },
    "training is sharded over trainer.num_processes with FSDP2 and AdamW, without options of their own": {
        "": "algorithm.kl_ctrl",
        ACTOR: "optim strategy fsdp_config megatron veomni torchtitan engine model_engine automodel qat "
        "ulysses_sequence_parallel_size use_torch_compile rollout_n nccl_timeout load_weight mindspeed fsdp "
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing "
        "recompute_old_log_prob use_fused_kernels pad_to_length use_remove_padding "
        "calculate_sum_pi_squared calculate_entropy log_prob_micro_batch_size_per_gpu "
        "log_prob_micro_batch_size shuffle data_loader_seed",
        "critic": "strategy enable fsdp fsdp_config megatron veomni torchtitan engine model optim "
        "forward_micro_batch_size forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu "
        "ulysses_sequence_parallel_size shuffle data_loader_seed profiler rollout_n "
        "loss_scale_factor nccl_timeout load_weight",
    },
    "a checkpoint holds all that --resume needs": {
        ACTOR: "checkpoint",
        "critic": "checkpoint",
        "trainer": "max_critic_ckpt_to_keep resume_mode",
    },
    "rewards are computed by the workers of the rollout": {
        "reward": "num_workers launch_reward_fn_async use_reward_loop reward_kwargs reward_manager "
        "custom_reward_function reward_loop_source reward_loop_module_path reward_loop_class_name",
        "reward_model": "num_workers launch_reward_fn_async use_reward_loop",
    },
    "it belongs to Hydra": {"": "hydra defaults"},
}
"""Keys without an effect here: by the reason, the names in each section."""
UNSUPPORTED: Mapping[str, str] = {
    f"{MODEL}.lora_adapter_path": "merge the adapter into the model, and set model.path",
    f"{MODEL}.exclude_modules": "select the modules with model.target_modules",
    f"{MODEL}.custom_chat_template": "write the template to a file, and set model.chat_template_path",
    f"{MODEL}.external_lib": "import it in a file of rollout.agent.loop_files",
    f"{MODEL}.override_config.moe_config": "train all experts and routers",
    f"{MODEL}.mtp.enable": "train without multi-token prediction",
    f"{ROLLOUT}.quantization": "train and serve the model without quantisation",
    f"{ROLLOUT}.quantization_config_file": "train and serve the model without quantisation",
    f"{ROLLOUT}.qat.enable": "train and serve the model without quantisation",
    f"{ACTOR}.qat.enable": "train and serve the model without quantisation",
    f"{ACTOR}.fsdp_config.qat.enable": "train and serve the model without quantisation",
    f"{ROLLOUT}.enable_rollout_routing_replay": "train without the replay of routers",
    f"{ROLLOUT}.multi_turn.function_tool_path": "list the functions in rollout.multi_turn.tools, as file.py:name",
    f"{ROLLOUT}.multi_turn.completion_callback": "write an agent loop (docs/how-to.md)",
    f"{ROLLOUT}.agent.agent_loop_manager_class": "leave it out: the manager is that of this package",
    f"{ROLLOUT}.disaggregation.enabled": "serve prefill and decoding together",
    "algorithm.use_pf_ppo": "train on all trajectories",
    "trainer.val_only": "run agent-loop eval",
    "trainer.default_hdfs_dir": "copy trainer.run_dir",
    "trainer.checkpoint_callback_class": "read trainer.run_dir",
    "rollout.total_rollout_steps": "set trainer.total_steps",
    "rollout.test_freq": "set trainer.val_every",
    "data.custom_cls.path": "name a function that returns rows in data.train_files, as file.py:function",
    "data.datagen.path": "name a function that returns rows in data.train_files, as file.py:function",
    "data.sampler.class_name": "choose a data.sampler, or register yours with @row_sampler",
    "data.sampler.class_path": "choose a data.sampler, or register yours with @row_sampler",
    "data.train_max_samples": "write fewer rows to data.train_files",
    f"{ACTOR}.freeze_vision_tower": "train the vision tower too, or set model.lora_rank",
    "reward_model.enable": "use a judge: reward.function is a YAML file with its questions (docs/rewards.md)",
    "reward.reward_model.enable": "use a judge: reward.function is a YAML file with its questions (docs/rewards.md)",
    "reward.reward_manager.module.path": "write a reward.function",
    "distillation.enabled": "set distillation.teachers, or actor.reference_path and actor.kl_loss_coef",
}
"""Keys without a counterpart, which are accepted if they are switched off, and what to do instead."""
RENAMED: Mapping[str, str] = {
    MODEL: "model",
    f"{MODEL}.enable_gradient_checkpointing": "actor.gradient_checkpointing",
    ROLLOUT: "rollout",
    f"{ROLLOUT}.val_kwargs": "rollout.val",
    f"{ROLLOUT}.single_turn_response_length": "rollout.multi_turn.max_turn_tokens",
    f"{ROLLOUT}.multi_turn.max_turns": "rollout.multi_turn.max_assistant_turns",
    "trainer.default_local_dir": "trainer.run_dir",
    "trainer.total_epochs": "trainer.total_epochs",
    "trainer.critic_warmup": "critic.head_start",
    "data.max_prompt_length": "rollout.prompt_length",
    "data.max_response_length": "rollout.response_length",
    "data.tokenizer": "model.tokenizer_path",
    "data.train_files": "data.train_files",
    "data.val_files": "data.val_files",
    "data.seed": "data.seed",
    "data.apply_chat_template_kwargs": "model.chat_template_kwargs",
    ACTOR: "actor",
    f"{ACTOR}.optim.lr": "actor.lr",
    f"{ACTOR}.optim.weight_decay": "actor.weight_decay",
    f"{ACTOR}.optim.betas": "actor.betas",
    f"{ACTOR}.use_prefix_grouper": "actor.share_prefixes",
    f"{ACTOR}.policy_loss.tau_pos": "actor.tau_pos",
    f"{ACTOR}.policy_loss.tau_neg": "actor.tau_neg",
    "actor_rollout_ref.ref.model.path": "actor.reference_path",
    "critic.model.path": "critic.path",
    "critic.model.enable_gradient_checkpointing": "critic.gradient_checkpointing",
    "critic.optim.lr": "critic.lr",
    "critic.optim.weight_decay": "critic.weight_decay",
    "critic.optim.betas": "critic.betas",
    "critic.cliprange_value": "critic.clip_range_value",
}
"""Keys with the same values here. The name of a section is that of all its keys."""
OTHERS = (
    Row(f"{MODEL}.lora.type", Only(("lora", None)), "remove the key"),
    Row(f"{MODEL}.override_config", Only((None, {})), "change config.json in the model's folder"),
    Row(f"{ROLLOUT}.do_sample", Only((True,)), "set rollout.temperature=0"),
    Row(f"{ROLLOUT}.ignore_eos", Only((False,)), "remove the key"),
    Row(f"{ROLLOUT}.dtype", Values("model.dtype", {"bf16": "bfloat16"})),
    Row(f"{ROLLOUT}.mode", Only(("async", None)), "remove the key: the servers are always asynchronous"),
    Row(
        f"{ROLLOUT}.multi_turn.max_tool_response_length",
        "rollout.multi_turn.max_tool_response_length",
        "it counts tokens here, and characters in verl",
    ),
    Row(
        "algorithm.kl_penalty",
        Values("algorithm.kl_reward_type", {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}),
    ),
    Row("algorithm.kl_ctrl.type", Only(("fixed",)), "remove the key"),
    Row("trainer.total_training_steps", Values("trainer.total_steps", NEVER)),
    Row("trainer.save_freq", Values("trainer.save_every", NEVER)),
    Row("trainer.test_freq", Values("trainer.val_every", NEVER)),
    Row("trainer.max_ckpt_to_keep", Values("trainer.keep_checkpoints", NEVER)),
    Row("trainer.max_actor_ckpt_to_keep", Values("trainer.keep_checkpoints", NEVER)),
    Row("trainer.resume_from_path", Effect.OTHER, "agent-loop train resumes with --resume-from PATH"),
    Row("trainer.device", Values("model.device", {"cuda": "auto", "gpu": "auto"})),
    Row(
        "trainer.v1.trainer_mode",
        Values("trainer.mode", {"colocate_async": "async", "separate_async": "async"}),
    ),
    Row("data.truncation", Values("rollout.truncate_prompt", {"error": "no"})),
    Row("data.trust_remote_code", Effect.OTHER, "model.trust_remote_code decides"),
    Row("data.val_max_samples", Values("data.val_max_rows", NEVER)),
    Row("data.return_raw_chat", Only((True,)), "remove the key"),
    Row("data.reward_fn_key", Only(("data_source",)), "name the column data_source"),
    Row(
        "data.filter_overlong_prompts",
        Effect.OTHER,
        "rows with longer prompts stay: their trajectories end at once, and are not trained",
    ),
    Row(f"{ACTOR}.kl_loss_type", Values("actor.kl_loss_type", KL)),
    Row(
        f"{ACTOR}.use_rollout_log_probs", Values("actor.old_log_probs", {True: "rollout", False: "recompute"})
    ),
    Row(f"{ACTOR}.router_replay.mode", Only(("disabled", None)), "train without the replay of routers"),
    Row("reward.reward_manager.source", Only(("register",)), "write a reward.function"),
)


def _all_rows() -> Iterator[Row]:
    yield from COMBINED
    for note, sections in NOT_NEEDED.items():
        for section, names in sections.items():
            yield from rows(section, names, Effect.NONE, note)
    yield from (Row(key, OFF, remedy) for key, remedy in UNSUPPORTED.items())
    yield from (Row(key, target) for key, target in RENAMED.items())
    yield from OTHERS


TABLE: Mapping[str, Row] = {row.key: row for row in _all_rows()}

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
