"""Settings of verl that are translated together, because several keys have one counterpart here.

Each function returns settings of this package, and raises ConfigError if there is no counterpart. Functions are applied
in the order of this file, and see the settings of those before them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from agent_loop.config.validation import parse_value
from agent_loop.config.values import Coefficient, NotNegative, Positive, Tokens
from agent_loop.config.verl.rows import COMBINED as COMBINED
from agent_loop.config.verl.rows import Given, together
from agent_loop.errors import ConfigError

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"
ENGINES = ("vllm", "sglang")

# -- rollout -----------------------------------------------------------------------------------------------------------

ENGINE_OPTIONS: Mapping[str, tuple[str | None, str | None]] = {
    "gpu_memory_utilization": ("gpu_memory_utilization", "mem_fraction_static"),
    "enforce_eager": ("enforce_eager", "disable_cuda_graph"),
    "max_num_seqs": ("max_num_seqs", "max_running_requests"),
    "max_num_batched_tokens": ("max_num_batched_tokens", None),
    "enable_chunked_prefill": ("enable_chunked_prefill", None),
    "tensor_model_parallel_size": ("tensor_parallel_size", "tp_size"),
    "pipeline_model_parallel_size": ("pipeline_parallel_size", "pp_size"),
}
"""Options of engines in verl, and their names in vLLM and SGLang."""
OWN_NAME = "under the engine's own name"
SET_ELSEWHERE = (
    "max_model_len", "dtype", "seed", "model", "model_path", "context_length", "skip_tokenizer_init", "logprobs_mode",
)  # fmt: skip
"""Options of vLLM and SGLang that other settings of this package determine."""


@together(
    ROLLOUT,
    " ".join((*ENGINE_OPTIONS, *(f"engine_kwargs.{name}" for name in ENGINES))),
    "under the engine's own name",
)
def engine_options(given: Given) -> Mapping[str, Any]:
    """Return the options of the engine that is used, under its own names."""
    engine = given.own("rollout.engine")
    if engine not in ENGINES:
        return {}
    found: dict[str, Any] = {}
    for name, targets in ENGINE_OPTIONS.items():
        value, target = given.get(f"{ROLLOUT}.{name}"), targets[ENGINES.index(engine)]
        if target is not None and value is not None and not (value == 1 and "parallel" in name):
            found[target] = value
    own: dict[str, Any] = given.get(f"{ROLLOUT}.engine_kwargs.{engine}", kind=dict[str, Any]) or {}
    found |= {name: value for name, value in own.items() if name not in SET_ELSEWHERE and value is not None}
    return {"rollout.engine_kwargs": found} if found else {}


@together(f"{ROLLOUT}.val_kwargs", "do_sample temperature")
def val_sampling(given: Given) -> Mapping[str, Any]:
    """Return the temperature of evaluations."""
    temperature = given.get(f"{ROLLOUT}.val_kwargs.temperature")
    if temperature is None and given.get(f"{ROLLOUT}.val_kwargs.do_sample", kind=bool) is False:
        temperature = 0.0
    return {} if temperature is None else {"rollout.val.temperature": temperature}


@together(ROLLOUT, "multi_turn.enable", "rows may name another agent loop")
def multi_turn(given: Given) -> Mapping[str, Any]:
    """Return the agent loop of rows without a name, which has no tools if `enable` is false."""
    turns = f"{ROLLOUT}.multi_turn"
    is_used = given.get(f"{turns}.tool_config_path", f"{turns}.interaction_config_path") is not None
    if (
        not is_used
        or given.get(f"{turns}.enable", kind=bool)
        or given.get(f"{ROLLOUT}.agent.default_agent_loop")
    ):
        return {}
    return {"rollout.agent.default_agent_loop": "single_turn_agent"}


@together(ROLLOUT, "over_sample_rate")
def over_sample(given: Given) -> Mapping[str, Any]:
    """Return the factor of the prompts that start."""
    rate = given.get(f"{ROLLOUT}.over_sample_rate", kind=Coefficient)
    return {"rollout.over_sample": 1 + rate} if rate else {}


# -- trainer and data --------------------------------------------------------------------------------------------------


@together("trainer", "logger", "metrics.jsonl is always written")
def loggers(given: Given) -> Mapping[str, Any]:
    """Return the loggers."""
    names = given.get("trainer.logger")
    names = [names] if isinstance(names, str) else names
    if isinstance(names, list):
        names = [name for name in cast(list[Any], names) if name not in ("file", "tracking")]
    return {} if names is None else {"trainer.logger": names}


@together("data", "train_batch_size")
@together("async_training", "require_batches")
def batch_size(given: Given) -> Mapping[str, Any]:
    """Return the prompts per step. verl's asynchronous trainer has 0, and counts mini-batches."""
    size = given.get("data.train_batch_size")
    if size == 0:
        num_batches = given.get("async_training.require_batches", kind=Positive) or 1
        size = (given.get(f"{ACTOR}.ppo_mini_batch_size", kind=Positive) or 0) * num_batches
    return {} if size is None else {"data.train_batch_size": size}


@together("async_training", "staleness_threshold trigger_parameter_sync_step")
def asynchronous(given: Given) -> Mapping[str, Any]:
    """Return the mode and the staleness."""
    threshold = given.get("async_training.staleness_threshold", kind=Coefficient) or 0
    every = given.get("async_training.trigger_parameter_sync_step", kind=Positive) or 1
    return {"trainer.mode": "async", "trainer.max_staleness": max(1, math.ceil(threshold * every))}


@together("trainer", "n_gpus_per_node nnodes")
@together(ROLLOUT, "data_parallel_size nnodes n_gpus_per_node")
@together("rollout", "nnodes n_gpus_per_node")
def machines(given: Given) -> Mapping[str, Any]:
    """Return the numbers of processes and servers on verl's nodes."""
    gpus = given.get("trainer.n_gpus_per_node", kind=NotNegative)
    nodes = given.get("trainer.nnodes", kind=NotNegative) or 1
    if gpus is None and nodes > 1:
        raise ConfigError(
            f"trainer.nnodes is {nodes}, but trainer.n_gpus_per_node is not given; give both, or set "
            "trainer.num_processes and trainer.runtime=ray"
        )
    if not gpus:
        return {}
    tensor, pipeline = (
        given.get(f"{ROLLOUT}.{name}_model_parallel_size", kind=Positive) or 1
        for name in ("tensor", "pipeline")
    )
    apart = (given.get("rollout.nnodes", f"{ROLLOUT}.nnodes", kind=NotNegative) or 0) * (
        given.get("rollout.n_gpus_per_node", f"{ROLLOUT}.n_gpus_per_node", kind=NotNegative) or 0
    )
    found: dict[str, Any] = {"trainer.num_processes": gpus * nodes}
    if nodes > 1:
        found["trainer.runtime"] = "ray"
    if given.own("rollout.engine") in ENGINES:
        num_servers = max(1, (apart or gpus * nodes) // (tensor * pipeline))
        found["rollout.num_servers"] = num_servers
        shares = not apart and nodes == 1 and num_servers * tensor == gpus
        sleeps = given.own("rollout.free_cache_engine") and given.own("trainer.mode") == "sync"
        if shares and sleeps and given.get("trainer.device") != "cpu":
            found["placement.colocated"] = "all"
    return found


# -- actor and critic --------------------------------------------------------------------------------------------------


@together(MODEL, "lora_rank lora_alpha target_modules lora.rank lora.alpha lora.target_modules")
def adapters(given: Given) -> Mapping[str, Any]:
    """Return the adapters, which verl's engines have in different sections."""
    section = f"{MODEL}.lora." if given.get(f"{MODEL}.lora.rank") else f"{MODEL}.lora_"
    modules = f"{MODEL}.lora.target_modules" if section.endswith(".") else f"{MODEL}.target_modules"
    found = {
        "model.lora_rank": given.get(f"{section}rank"),
        "model.lora_alpha": given.get(f"{section}alpha"),
        "model.target_modules": given.get(modules),
    }
    return {key: value for key, value in found.items() if value is not None}


def _add_update(prefix: str, target: str) -> None:
    """Add the rows of the updates of the actor or the critic."""

    @together(prefix, "optim.clip_grad grad_clip")
    def grad_clip(given: Given) -> Mapping[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Return the maximum norm of the gradient."""
        norms = [given.get(f"{prefix}.{name}", kind=float) for name in ("optim.clip_grad", "grad_clip")]
        changed = [norm for norm in norms if norm not in (None, 1.0)]  # 1.0 is the default of both
        return {f"{target}.grad_clip": changed[0] if changed else 1.0}

    @together(
        f"{prefix}.optim",
        "lr_warmup_steps lr_warmup_steps_ratio lr_scheduler_type warmup_style lr_decay_style min_lr_ratio "
        "lr_decay_steps total_training_steps",
    )
    def schedule(given: Given) -> Mapping[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Return the warm-up and the decay of the learning rate."""
        section, found = f"{prefix}.optim", dict[str, Any]()
        steps = given.get(f"{section}.lr_warmup_steps", kind=int)
        share = given.get(f"{section}.lr_warmup_steps_ratio", kind=Coefficient)
        total = given.get("trainer.total_training_steps", f"{section}.total_training_steps", kind=int) or -1
        if steps is not None and steps >= 0:
            found[f"{target}.warmup_steps"] = steps
        elif share and total < 1:
            raise ConfigError(
                f"{section}.lr_warmup_steps_ratio is {share}, a share of a number of steps that is not given; set "
                f"{target}.warmup_steps"
            )
        elif steps is not None or share is not None:
            found[f"{target}.warmup_steps"] = round((share or 0) * total)
        kinds = (f"{section}.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style"))
        kind, decay = given.get(*kinds), given.get(f"{section}.lr_decay_steps") or total
        if kind not in (None, "constant"):
            if decay == -1:
                raise ConfigError(
                    f"the schedule of {section} is {kind!r}, over a number of steps that is not given; set "
                    f"{target}.decay_steps and {target}.min_lr_share"
                )
            found[f"{target}.decay_steps"] = decay
            found[f"{target}.min_lr_share"] = given.get(f"{section}.min_lr_ratio") or 0.0
        return found

    @together(prefix, "ppo_mini_batch_size", "a number of mini-batches")
    def mini_batches(given: Given) -> Mapping[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Return the number of mini-batches per step."""
        size = given.get(f"{prefix}.ppo_mini_batch_size", kind=Positive)
        rows = given.own("data.train_batch_size", kind=Positive)
        return {} if size is None else {f"{target}.ppo_mini_batches": math.ceil(rows / size)}

    @together(
        prefix,
        "ppo_micro_batch_size_per_gpu ppo_micro_batch_size ppo_max_token_len_per_gpu use_dynamic_bsz",
    )
    def micro_batches(given: Given) -> Mapping[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Return the largest number of tokens in a micro-batch."""
        tokens = given.get(f"{prefix}.ppo_max_token_len_per_gpu", kind=Positive)
        names = (f"{prefix}.ppo_micro_batch_size_per_gpu", f"{prefix}.ppo_micro_batch_size")
        rows = given.get(*names, kind=Positive)
        length: int = sum(given.own(f"rollout.{side}_length", kind=Tokens) for side in ("prompt", "response"))
        if rows and (tokens is None or given.get(f"{prefix}.use_dynamic_bsz", kind=bool) is False):
            tokens = rows * length
        if tokens is None:
            return {}
        return {f"{target}.max_tokens_per_micro_batch": min(max(tokens, length), 2**24)}


_add_update(ACTOR, "actor")
_add_update("critic", "critic")


@together(ACTOR, "clip_ratio clip_ratio_low clip_ratio_high")
def clip(given: Given) -> Mapping[str, Any]:
    """Return both bounds. Scripts write a lower one of 1 or more, which has no effect."""
    found: dict[str, Any] = {}
    for side in ("low", "high"):
        value = given.get(f"{ACTOR}.clip_ratio_{side}", f"{ACTOR}.clip_ratio", kind=float)
        if value is not None:
            found[f"actor.clip_ratio_{side}"] = min(value, 0.9999) if side == "low" else value
    return found


def _penalty(is_used: bool | None, coefficient: Any, target: str) -> Mapping[str, Any]:
    if is_used is None and coefficient is None:
        return {}
    return {target: 0.0 if is_used is False else 0.001 if coefficient is None else coefficient}


@together(ACTOR, "use_kl_loss kl_loss_coef")
def kl_loss(given: Given) -> Mapping[str, Any]:
    """Return the weight of the KL penalty in the loss."""
    is_used = given.get(f"{ACTOR}.use_kl_loss", kind=bool)
    return _penalty(is_used, given.get(f"{ACTOR}.kl_loss_coef"), "actor.kl_loss_coef")


@together("algorithm", "use_kl_in_reward kl_ctrl.kl_coef")
def kl_reward(given: Given) -> Mapping[str, Any]:
    """Return the weight of the KL penalty in the reward."""
    is_used = given.get("algorithm.use_kl_in_reward", kind=bool)
    return _penalty(is_used, given.get("algorithm.kl_ctrl.kl_coef"), "algorithm.kl_reward_coef")


@together(ACTOR, "policy_loss.loss_mode loss_mode")
def loss(given: Given) -> Mapping[str, Any]:
    """Return the policy loss."""
    name = given.get(f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_mode", kind=str)
    if name in (None, "vanilla"):
        return {} if name is None else {"actor.policy_loss": "ppo"}
    if name in ("dppo_tv", "dppo_kl"):
        return {"actor.policy_loss": "dppo", "actor.dppo_divergence": name.removeprefix("dppo_")}
    if name not in ("gspo", "cispo", "sapo") and not set(":.") & set(name):
        raise ConfigError(
            f"{ACTOR}.policy_loss.loss_mode is {name!r}; choose vanilla, gspo, cispo, sapo, dppo_tv or dppo_kl, or "
            "register the loss with @policy_loss and set actor.policy_loss"
        )
    return {"actor.policy_loss": name}


@together(ACTOR, "loss_agg_mode loss_scale_factor")
def aggregation(given: Given) -> Mapping[str, Any]:
    """Return how the losses of tokens are combined."""
    mode, factor = given.get(f"{ACTOR}.loss_agg_mode"), given.get(f"{ACTOR}.loss_scale_factor")
    if mode == "seq-mean-token-sum":
        return {"actor.loss_agg_mode": "seq-mean-token-sum-norm", "actor.loss_length": 1}
    found = {"actor.loss_agg_mode": mode, "actor.loss_length": factor}
    return {key: value for key, value in found.items() if value is not None}


# -- algorithm ---------------------------------------------------------------------------------------------------------

LEVELS = {
    "token": "token",
    "seq_sum": "sequence",
    "seq_mean": "geometric",
    "sequence": "sequence",
    "geometric": "geometric",
}


@together(CORRECTION, "rollout_is rollout_is_threshold rollout_rs rollout_rs_threshold bypass_mode loss_type")
@together(ACTOR, "tis_imp_ratio_cap")
@together(
    "algorithm",
    "rollout_correction rollout_is rollout_is_threshold rollout_is_level rollout_is_mode "
    "rollout_is_threshold_lower rollout_is_veto_threshold",
)
def correction(given: Given) -> Mapping[str, Any]:
    """Return the importance sampling between rollout and trainer."""
    weights = given.get(f"{CORRECTION}.rollout_is", "algorithm.rollout_is_level") or None
    old_bounds = ("algorithm.rollout_is_threshold", f"{ACTOR}.tis_imp_ratio_cap")
    if weights is None and given.get(*old_bounds) not in (None, -1):
        weights = "token"
    rejection = given.get(f"{CORRECTION}.rollout_rs", kind=str)
    if given.get(f"{CORRECTION}.loss_type") == "reinforce":
        raise ConfigError(
            f"{CORRECTION}.loss_type is 'reinforce'; set actor.policy_loss=cispo, which keeps the gradient of every "
            "token"
        )
    if given.get(f"{CORRECTION}.bypass_mode", kind=bool):
        if weights is not None or rejection is not None:
            raise ConfigError(
                f"{CORRECTION}.bypass_mode is true, so that the ratio of the loss is that of rollout and trainer "
                "already; set it to false, or leave rollout_is and rollout_rs out"
            )
        return {"actor.old_log_probs": "rollout"}
    if weights is None and rejection is None:
        return {"actor.correction.kind": "none"}
    found: dict[str, Any] = {"actor.old_log_probs": "recompute"}
    if rejection is None:
        upper = _bounds(given, f"{CORRECTION}.rollout_is_threshold", *old_bounds)[-1]
        found |= {"actor.correction.kind": "truncate", "actor.correction.level": weights}
        return found if upper is None else {**found, "actor.correction.max_ratio": upper}
    level = next((ours for theirs, ours in LEVELS.items() if rejection.startswith(theirs)), None)
    if level is None or "," in rejection or rejection.endswith(("k2", "k3")):
        raise ConfigError(
            f"{CORRECTION}.rollout_rs is {rejection!r}; choose one of token_k1, seq_sum_k1 and seq_mean_k1, or set "
            "actor.correction yourself"
        )
    found |= {"actor.correction.kind": "mask", "actor.correction.level": level}
    lower, upper = _bounds(given, f"{CORRECTION}.rollout_rs_threshold")
    if upper is not None:
        found["actor.correction.max_ratio"] = upper
        found["actor.correction.min_ratio"] = 1 / upper if lower is None else lower
    return found


def _bounds(given: Given, *keys: str) -> tuple[float | None, float | None]:
    """Return the bounds in a threshold of verl: a number, or `lower_upper`."""
    text = given.get(*keys)
    if text is None:
        return None, None
    lower, _, upper = str(text).rpartition("_")
    return (
        parse_value(float, lower, key=keys[0]) if lower else None,
        parse_value(float, upper, key=keys[0]),
    )


@together("algorithm", "gdpo_reward_keys gdpo_reward_weights")
def gdpo(given: Given) -> Mapping[str, Any]:
    """Return the parts of the reward with their weights."""
    names = given.get("algorithm.gdpo_reward_keys", kind=list[str])
    weights = given.get("algorithm.gdpo_reward_weights", kind=list[float])
    if not names:
        return {}
    if weights and len(weights) != len(names):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(names)} keys; give one for each"
        )
    return {"algorithm.reward_parts": dict(zip(names, weights or [1.0] * len(names), strict=True))}


@together("algorithm.filter_groups", "enable metric max_num_gen_batches max_inflight_gen_batches")
def filter_groups(given: Given) -> Mapping[str, Any]:
    """Return the number of refills."""
    if not given.get("algorithm.filter_groups.enable", kind=bool):
        return {}
    refills = given.get("algorithm.filter_groups.max_num_gen_batches", kind=int) or 0
    return {
        "algorithm.drop_zero_variance_groups": True,
        "algorithm.max_refills": refills - 1 if refills > 0 else 20,
    }


# -- reward ------------------------------------------------------------------------------------------------------------

REWARD_FUNCTIONS = ("reward.custom_reward_function", "custom_reward_function")
OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
    "custom_reward_function.overlong_buffer",
)


ManagerName = Literal["naive", "batch", "dapo", "prime", "gdpo", "limited", "rate_limited", "remote"]


@together("", " ".join(f"{s}.{name}" for s in REWARD_FUNCTIONS for name in ("path", "name", "reward_kwargs")))
def reward_function(given: Given) -> Mapping[str, Any]:
    """Return the reward function."""
    for section in REWARD_FUNCTIONS:
        path, kwargs = given.get(f"{section}.path", kind=str), given.get(f"{section}.reward_kwargs")
        if path and kwargs:
            raise ConfigError(
                f"{section}.reward_kwargs is {kwargs!r}; give the parameters of the function these defaults"
            )
        if path:
            name = given.get(f"{section}.name") or "compute_score"
            return {"reward.function": path if ":" in path else f"{path}:{name}"}
    return {}


@together("", "reward_model.reward_manager reward.reward_manager.name")
def reward_manager(given: Given) -> Mapping[str, Any]:
    """Return whether the reward function takes a batch."""
    keys = ("reward.reward_manager.name", "reward_model.reward_manager")
    name = given.get(*keys, kind=ManagerName)
    return {} if name is None else {"reward.batch": name == "batch"}


@together(
    "", " ".join(f"{s}.{name}" for s in OVERLONG for name in ("enable", "len", "penalty_factor", "log"))
)
def overlong(given: Given) -> Mapping[str, Any]:
    """Return the penalty of long responses."""
    for section in OVERLONG:
        enabled = given.get(f"{section}.enable", kind=bool)
        if enabled is False:
            return {"algorithm.overlong_buffer": None}
        if enabled:
            found = {
                "algorithm.overlong_buffer": given.get(f"{section}.len"),
                "algorithm.overlong_penalty": given.get(f"{section}.penalty_factor"),
            }
            return {key: value for key, value in found.items() if value is not None}
    return {}
