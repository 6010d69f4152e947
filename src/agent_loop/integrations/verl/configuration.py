"""Configuration of a run under verl's names, for loops written for verl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from agent_loop.config import Config, ModelConfig, RolloutConfig, Section
from agent_loop.loops.base import LoopContext

UNLIMITED = -1
_latest: list[tuple[Config, DictConfig]] = []
"""Cache of the last configuration, because every trajectory of a run requests the same one."""


def verl_config(context: LoopContext) -> DictConfig:
    """Return the settings of the run under verl's names and under their own names.

    Options of verl without a counterpart have the value that describes the behaviour of this package, such as
    `rollout.calculate_log_probs: true`.
    """
    settings = context.settings
    if settings is None:
        return _build_config(_settings_of(context), context)
    if not _latest or _latest[0][0] is not settings:
        _latest[:] = [(settings, _build_config(settings, context))]
    return _latest[0][1]


def _settings_of(context: LoopContext) -> Config:
    """Return the settings of a context that was created without a configuration."""
    rollout = RolloutConfig(
        prompt_length=context.limits.prompt_length,
        response_length=context.limits.response_length,
        multi_turn=context.multi_turn,
    )
    return Config(rollout=rollout)


def _build_config(settings: Config, context: LoopContext) -> DictConfig:
    path = settings.model.path or str(getattr(context.template.tokenizer, "name_or_path", ""))
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": path})})
    sections = {
        "actor_rollout_ref": {
            "hybrid_engine": True,
            "model": _model(settings.model, settings=settings),
            "actor": _actor(settings),
            "rollout": _rollout(settings.rollout),
        },
        "data": _data(settings),
        "algorithm": _algorithm(settings),
        "critic": _critic(settings),
        "trainer": _trainer(settings),
        **_rewards(settings),
        "distillation": {"enabled": False},
    }
    return OmegaConf.create(sections)


def _dumped(section: Section) -> dict[str, Any]:
    return section.model_dump(mode="json", fallback=repr)


def _model(model: ModelConfig, *, settings: Config) -> dict[str, Any]:
    return {
        **_dumped(model),
        "override_config": {},
        "enable_gradient_checkpointing": bool(settings.actor.gradient_checkpointing),
        "use_remove_padding": settings.actor.share_prefixes,
        "lora": {"rank": model.lora_rank, "alpha": model.lora_alpha},
    }


def _actor(settings: Config) -> dict[str, Any]:
    actor, batch = settings.actor, settings.data.train_batch_size
    return {
        **_dumped(actor),
        "strategy": "fsdp",
        "ppo_mini_batch_size": max(1, batch // actor.ppo_mini_batches),
        "clip_ratio": actor.clip_ratio_low,
        "loss_scale_factor": actor.loss_length,
        "use_kl_loss": actor.kl_loss_coef > 0,
        "ppo_micro_batch_size_per_gpu": None,
        "ppo_max_token_len_per_gpu": actor.max_tokens_per_micro_batch,
        "rollout_n": settings.rollout.n,
        "loss_mode": actor.policy_loss,
        "optim": _optim(_dumped(actor)),
    }


def _optim(values: Mapping[str, Any]) -> dict[str, Any]:
    names = {"lr": "lr", "weight_decay": "weight_decay", "betas": "betas", "lr_warmup_steps": "warmup_steps"}
    return {name: values[key] for name, key in names.items()}


def _rollout(rollout: RolloutConfig) -> dict[str, Any]:
    own = _dumped(rollout)
    options: dict[str, Any] = own["engine_kwargs"]
    val: dict[str, Any] = own["val"]
    custom_server = own["agent"]["custom_async_server"] or {"path": None, "name": None}
    return {
        **own,
        "name": rollout.engine,
        "mode": "async",
        "do_sample": rollout.temperature > 0,
        "ignore_eos": False,
        "calculate_log_probs": True,
        "full_determinism": False,
        "over_sample_rate": 0,
        "log_prob_micro_batch_size_per_gpu": None,
        "prometheus": {"enable": rollout.metrics_port is not None, "port": rollout.metrics_port},
        "nnodes": 0,
        "n_gpus_per_node": 0,
        "load_format": options.get("load_format", "auto"),
        "dtype": options.get("dtype", "auto"),
        "max_model_len": options.get("max_model_len", rollout.prompt_length + rollout.response_length),
        "max_num_seqs": options.get("max_num_seqs", options.get("max_slots")),
        "gpu_memory_utilization": options.get("gpu_memory_utilization"),
        "enforce_eager": options.get("enforce_eager", False),
        "tensor_model_parallel_size": options.get("tensor_parallel_size", options.get("tp_size", 1)),
        "engine_kwargs": {"vllm": {}, "sglang": {}, "trtllm": {}, rollout.engine: options},
        "val_kwargs": {**val, "do_sample": rollout.val.temperature > 0},
        "multi_turn": {
            **own["multi_turn"],
            "enable": True,
            "function_tool_path": None,
            "use_inference_chat_template": False,
            "tokenization_sanity_check_mode": "disable",
        },
        "agent": {
            **own["agent"],
            "custom_async_server": custom_server,
            "agent_loop_manager_class": None,
        },
    }


def _data(settings: Config) -> dict[str, Any]:
    rollout, data = settings.rollout, settings.data
    cuts = {"no": "error", "left": "left", "right": "right"}
    return {
        **_dumped(data),
        "max_prompt_length": rollout.prompt_length,
        "max_response_length": rollout.response_length,
        "tokenizer": settings.model.tokenizer_path,
        "trust_remote_code": settings.model.trust_remote_code,
        "return_raw_chat": True,
        "return_multi_modal_inputs": True,
        "reward_fn_key": "data_source",
        "image_key": "images",
        "video_key": "videos",
        "truncation": cuts[rollout.truncate_prompt],
        "filter_overlong_prompts": False,
        "val_max_samples": data.val_max_rows or UNLIMITED,
        "dataloader_num_workers": 0,
        "tool_config_path": rollout.multi_turn.tool_config_path,
        "function_tool_path": None,
        "custom_cls": {"path": None, "name": None},
        "apply_chat_template_kwargs": settings.model.chat_template_kwargs,
        "mm_processor_kwargs": {},
    }


def _algorithm(settings: Config) -> dict[str, Any]:
    algorithm = settings.algorithm
    return {
        **_dumped(algorithm),
        "use_kl_in_reward": algorithm.kl_reward_coef > 0,
        "kl_penalty": algorithm.kl_reward_type,
        "filter_groups": {"enable": algorithm.max_refills > 0, "metric": "seq_reward"},
        "rollout_correction": {"rollout_is": None, "rollout_rs": None},
        "kl_ctrl": {"type": "fixed", "kl_coef": algorithm.kl_reward_coef},
    }


def _critic(settings: Config) -> dict[str, Any]:
    critic = settings.critic
    return {
        **_dumped(critic),
        "enable": settings.algorithm.adv_estimator == "gae",
        "model": {"path": critic.path or settings.model.path},
        "optim": _optim(_dumped(critic)),
        "cliprange_value": critic.clip_range_value,
    }


def _trainer(settings: Config) -> dict[str, Any]:
    trainer = settings.trainer
    return {
        **_dumped(trainer),
        "total_training_steps": trainer.total_steps,
        "resume_mode": "auto",
        "balance_batch": True,
        "use_v1": True,
        "save_freq": trainer.save_every or UNLIMITED,
        "test_freq": trainer.val_every or UNLIMITED,
        "default_local_dir": trainer.run_dir,
        "critic_warmup": settings.critic.head_start,
        "nnodes": 1,
        "n_gpus_per_node": 0,
        "device": settings.model.device,
    }


def _rewards(settings: Config) -> dict[str, Any]:
    path, _, name = (settings.reward.function or "").rpartition(":")
    function = {"path": path or None, "name": name or None}
    manager = "batch" if settings.reward.batch else "naive"
    model = {"enable": False, "model": {"path": None}, "reward_manager": manager}
    return {
        "reward": {
            **_dumped(settings.reward),
            "num_workers": settings.rollout.agent.num_workers,
            "custom_reward_function": function,
            "reward_manager": {"source": "register", "name": manager},
            "reward_model": {"enable": False, "model_path": None},
            "reward_kwargs": {},
        },
        "reward_model": model,
        "custom_reward_function": function,
    }
