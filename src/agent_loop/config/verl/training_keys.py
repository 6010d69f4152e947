"""Groups of verl's settings for actor, critic and algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agent_loop.config.verl.group import Group, Values, keys
from agent_loop.errors import ConfigError

A, C = "actor_rollout_ref.actor", "algorithm.rollout_correction"
MICRO_BATCHES = "ppo_micro_batch_size_per_gpu ppo_micro_batch_size ppo_max_token_len_per_gpu use_dynamic_bsz"
MAX_CLIP_LOW = 0.9999
"""Lower clip without effect. Scripts write 1 or more."""
LENGTHS = ("rollout.prompt_length", "rollout.response_length")


def _mini_batches(prefix: str) -> Callable[[Values], Mapping[str, Any]]:
    def translate(values: Values) -> Mapping[str, Any]:
        size = values.verl(f"{prefix}.ppo_mini_batch_size")
        if not isinstance(size, int) or size < 1:
            return {}
        target = "critic" if prefix == "critic" else "actor"
        return {f"{target}.ppo_mini_batches": math.ceil(values.own("data.train_batch_size") / size)}

    return translate


def _batch_size(values: Values) -> Mapping[str, Any]:
    """Return the prompts per step. verl's asynchronous trainer has 0, and counts mini-batches."""
    size = values.verl("data.train_batch_size")
    if size == 0:
        size = (values.verl(f"{A}.ppo_mini_batch_size") or 0) * (
            values.verl("async_training.require_batches") or 1
        )
    return {} if size is None else {"data.train_batch_size": size}


def _micro_batches(prefix: str) -> Callable[[Values], Mapping[str, Any]]:
    def translate(values: Values) -> Mapping[str, Any]:
        target = "critic" if prefix == "critic" else "actor"
        tokens = values.verl(f"{prefix}.ppo_max_token_len_per_gpu")
        rows = values.verl(f"{prefix}.ppo_micro_batch_size_per_gpu", f"{prefix}.ppo_micro_batch_size")
        length = values.own("rollout.prompt_length") + values.own("rollout.response_length")
        if values.verl(f"{prefix}.use_dynamic_bsz") is False and rows:
            tokens = None
        if tokens is None and rows:
            tokens = rows * length
        if tokens is None:
            return {}
        return {f"{target}.max_tokens_per_micro_batch": min(max(int(tokens), length), 2**24)}

    return translate


def _clip(values: Values) -> Mapping[str, Any]:
    both, low, high = (values.verl(f"{A}.clip_ratio{end}") for end in ("", "_low", "_high"))
    low = min(low, MAX_CLIP_LOW) if isinstance(low, int | float) else low
    found = {
        "actor.clip_ratio_low": both if low is None else low,
        "actor.clip_ratio_high": both if high is None else high,
    }
    return {key: value for key, value in found.items() if value is not None}


def _kl_loss(values: Values) -> Mapping[str, Any]:
    is_used, coef = values.verl(f"{A}.use_kl_loss"), values.verl(f"{A}.kl_loss_coef")
    if is_used is False:
        return {"actor.kl_loss_coef": 0.0}
    return {} if coef is None and is_used is None else {"actor.kl_loss_coef": 0.001 if coef is None else coef}


def _kl_reward(values: Values) -> Mapping[str, Any]:
    is_used, coef = values.verl("algorithm.use_kl_in_reward"), values.verl("algorithm.kl_ctrl.kl_coef")
    if is_used is False:
        return {"algorithm.kl_reward_coef": 0.0}
    return (
        {}
        if coef is None and is_used is None
        else {"algorithm.kl_reward_coef": 0.001 if coef is None else coef}
    )


LOSSES: Mapping[str, Mapping[str, Any]] = {
    "vanilla": {"actor.policy_loss": "ppo"},
    "gspo": {"actor.policy_loss": "gspo"},
    "cispo": {"actor.policy_loss": "cispo"},
    "sapo": {"actor.policy_loss": "sapo"},
    "dppo_tv": {"actor.policy_loss": "dppo", "actor.dppo_divergence": "tv"},
    "dppo_kl": {"actor.policy_loss": "dppo", "actor.dppo_divergence": "kl"},
}


def _loss(values: Values) -> Mapping[str, Any]:
    name = values.verl(f"{A}.policy_loss.loss_mode", f"{A}.loss_mode")
    if name in LOSSES:
        return LOSSES[name]
    if isinstance(name, str) and (":" in name or "." in name):
        return {"actor.policy_loss": name}
    raise ConfigError(
        f"{A}.policy_loss.loss_mode is {name!r}, which is not among {', '.join(LOSSES)}; choose one, or register "
        "the loss with @policy_loss and set actor.policy_loss"
    )


def _aggregation(values: Values) -> Mapping[str, Any]:
    mode, factor = values.verl(f"{A}.loss_agg_mode"), values.verl(f"{A}.loss_scale_factor")
    if mode == "seq-mean-token-sum":
        return {"actor.loss_agg_mode": "seq-mean-token-sum-norm", "actor.loss_length": 1}
    found = {"actor.loss_agg_mode": mode, "actor.loss_length": factor}
    return {key: value for key, value in found.items() if value is not None}


def _schedule(prefix: str) -> Callable[[Values], Mapping[str, Any]]:
    def translate(values: Values) -> Mapping[str, Any]:
        target = "critic" if prefix == "critic" else "actor"
        found: dict[str, Any] = {}
        steps, share = (
            values.verl(f"{prefix}.optim.lr_warmup_steps"),
            values.verl(f"{prefix}.optim.lr_warmup_steps_ratio"),
        )
        total = values.verl("trainer.total_training_steps", f"{prefix}.optim.total_training_steps")
        is_total_known = isinstance(total, int) and total > 0
        if isinstance(steps, int) and steps >= 0:
            found[f"{target}.warmup_steps"] = steps
        elif share:
            if not is_total_known:
                raise ConfigError(
                    f"{prefix}.optim.lr_warmup_steps_ratio is {share}, a share of a number of steps that is not given; "
                    f"set {target}.warmup_steps"
                )
            found[f"{target}.warmup_steps"] = round(share * total)
        elif steps is not None or share is not None:
            found[f"{target}.warmup_steps"] = 0
        kind = values.verl(
            *(f"{prefix}.optim.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style"))
        )
        decay = values.verl(f"{prefix}.optim.lr_decay_steps")
        if kind not in (None, "constant"):
            if not (decay or is_total_known):
                raise ConfigError(
                    f"the schedule of {prefix}.optim is {kind!r}, over a number of steps that is not given; set "
                    f"{target}.decay_steps and {target}.min_lr_share"
                )
            found[f"{target}.decay_steps"] = decay or total
            found[f"{target}.min_lr_share"] = values.verl(f"{prefix}.optim.min_lr_ratio") or 0.0
        return found

    return translate


def _schedule_keys(prefix: str) -> list[str]:
    names = (
        "lr_warmup_steps lr_warmup_steps_ratio lr_scheduler_type warmup_style lr_decay_style min_lr_ratio "
        "lr_decay_steps total_training_steps"
    )
    return keys(f"{prefix}.optim", names)


def _correction(values: Values) -> Mapping[str, Any]:
    weights = values.verl(f"{C}.rollout_is", "algorithm.rollout_is_level")
    bound = values.verl(
        f"{C}.rollout_is_threshold", "algorithm.rollout_is_threshold", f"{A}.tis_imp_ratio_cap"
    )
    rejection, limits = values.verl(f"{C}.rollout_rs"), values.verl(f"{C}.rollout_rs_threshold")
    is_off = (None, "null", "none", False)
    if (
        values.verl(f"{A}.tis_imp_ratio_cap", "algorithm.rollout_is_threshold") not in (*is_off, -1)
        and weights in is_off
    ):
        weights = "token"
    if values.verl(f"{C}.loss_type") == "reinforce":
        raise ConfigError(
            f"{C}.loss_type is 'reinforce'; set actor.policy_loss=cispo, which keeps the gradient of every token"
        )
    found: dict[str, Any] = {}
    if values.verl(f"{C}.bypass_mode") is True:
        found["actor.old_log_probs"] = "rollout"
        if weights not in is_off or rejection not in is_off:
            raise ConfigError(
                f"{C}.bypass_mode is true, so that the ratio of the loss is that of rollout and trainer already; set "
                "it to false, or leave rollout_is and rollout_rs out"
            )
        return found
    if weights in is_off and rejection in is_off:
        return {"actor.correction.kind": "none"}
    found["actor.old_log_probs"] = "recompute"
    if rejection not in is_off:
        found |= _rejection(str(rejection), limits)
    else:
        found |= {"actor.correction.kind": "truncate", "actor.correction.level": str(weights)}
        _, upper = _bounds(bound)
        if upper is not None:
            found["actor.correction.max_ratio"] = upper
    return found


def _rejection(name: str, limits: Any) -> dict[str, Any]:
    levels = {
        "token": "token",
        "seq_sum": "sequence",
        "seq_mean": "geometric",
        "sequence": "sequence",
        "geometric": "geometric",
    }
    level = next((ours for theirs, ours in levels.items() if name.startswith(theirs)), None)
    if level is None or "," in name or name.endswith(("k2", "k3")):
        raise ConfigError(
            f"{C}.rollout_rs is {name!r}; choose one of token_k1, seq_sum_k1 and seq_mean_k1, or set "
            "actor.correction yourself"
        )
    found: dict[str, Any] = {"actor.correction.kind": "mask", "actor.correction.level": level}
    lower, upper = _bounds(limits)
    if upper is not None:
        found["actor.correction.max_ratio"] = upper
        found["actor.correction.min_ratio"] = 1 / upper if lower is None else lower
    return found


def _bounds(value: Any) -> tuple[float | None, float | None]:
    """Return the bounds in a threshold of verl: a number, or `lower_upper`."""
    if value in (None, "null", "none"):
        return None, None
    try:
        numbers = [float(part) for part in str(value).split("_")]
    except ValueError as error:
        raise ConfigError(f"the threshold {value!r} of the rollout correction is not a number") from error
    return (numbers[0], numbers[1]) if len(numbers) > 1 else (None, numbers[0])


CORRECTION_KEYS = (
    *keys(C, "rollout_is rollout_is_threshold rollout_rs rollout_rs_threshold bypass_mode loss_type"),
    *keys(C, "rollout_is_batch_normalize rollout_token_veto_threshold rollout_rs_threshold_lower"),
    *keys(C, "rollout_is_mode rollout_is_level"),
    *keys("algorithm", "rollout_is rollout_is_threshold rollout_is_level rollout_is_mode rollout_correction"),
    *keys("algorithm", "rollout_is_threshold_lower rollout_is_veto_threshold"),
    f"{A}.tis_imp_ratio_cap",
)


OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg", "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer", "custom_reward_function.overlong_buffer",
)  # fmt: skip


def _overlong(values: Values) -> Mapping[str, Any]:
    for section in OVERLONG:
        enabled, length = values.verl(f"{section}.enable"), values.verl(f"{section}.len")
        if enabled is False:
            return {"algorithm.overlong_buffer": None}
        if enabled and length:
            penalty = values.verl(f"{section}.penalty_factor")
            return {
                "algorithm.overlong_buffer": length,
                "algorithm.overlong_penalty": 1.0 if penalty is None else penalty,
            }
    return {}


ESTIMATORS: Mapping[str, str] = {"rloo_vectorized": "rloo", "grpo_vectorized": "grpo"}
NO_ESTIMATOR = ("opo", "grpo_passk", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline")


def _estimator(values: Values) -> Mapping[str, Any]:
    name = values.verl("algorithm.adv_estimator")
    if name in NO_ESTIMATOR:
        raise ConfigError(
            f"algorithm.adv_estimator is {name!r}; choose grpo or rloo, or register the estimator with "
            "@advantage_estimator"
        )
    return {"algorithm.adv_estimator": ESTIMATORS.get(name, name)}


def _gdpo(values: Values) -> Mapping[str, Any]:
    keys, weights = values.verl("algorithm.gdpo_reward_keys"), values.verl("algorithm.gdpo_reward_weights")
    if not keys:
        return {}
    names = list(cast(Sequence[str], keys))
    factors = list(cast(Sequence[float], weights)) if weights else [1.0] * len(names)
    if len(factors) != len(names):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights has {len(factors)} numbers for {len(names)} keys; give one for each"
        )
    return {"algorithm.reward_parts": dict(zip(names, factors, strict=True))}


def _filter_groups(values: Values) -> Mapping[str, Any]:
    if not values.verl("algorithm.filter_groups.enable"):
        return {}
    refills = values.verl("algorithm.filter_groups.max_num_gen_batches")
    return {
        "algorithm.drop_zero_variance_groups": True,
        "algorithm.max_refills": max(0, refills - 1) if isinstance(refills, int) and refills > 0 else 20,
    }


def _async_training(values: Values) -> Mapping[str, Any]:
    threshold = values.verl("async_training.staleness_threshold")
    every = values.verl("async_training.trigger_parameter_sync_step")
    return {
        "trainer.mode": "async",
        "trainer.max_staleness": max(1, math.ceil((threshold or 0) * (every or 1))),
    }


TRAINING_GROUPS: Sequence[Group] = (
    Group(
        ["data.train_batch_size", "async_training.require_batches"],
        _batch_size,
        [f"{A}.ppo_mini_batch_size"],
    ),
    Group([f"{A}.ppo_mini_batch_size"], _mini_batches(A), ["data.train_batch_size"]),
    Group(["critic.ppo_mini_batch_size"], _mini_batches("critic"), ["data.train_batch_size"]),
    Group(keys(A, MICRO_BATCHES), _micro_batches(A), LENGTHS),
    Group(keys("critic", MICRO_BATCHES), _micro_batches("critic"), LENGTHS),
    Group(keys(A, "clip_ratio clip_ratio_low clip_ratio_high"), _clip),
    Group(keys(A, "use_kl_loss kl_loss_coef"), _kl_loss),
    Group(["algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"], _kl_reward),
    Group(keys(A, "policy_loss.loss_mode loss_mode"), _loss),
    Group(keys(A, "loss_agg_mode loss_scale_factor"), _aggregation),
    Group(_schedule_keys(A), _schedule(A), ["trainer.total_training_steps"]),
    Group(_schedule_keys("critic"), _schedule("critic"), ["trainer.total_training_steps"]),
    Group(CORRECTION_KEYS, _correction),
    Group([key for section in OVERLONG for key in keys(section, "enable len penalty_factor log")], _overlong),
    Group(["algorithm.adv_estimator"], _estimator),
    Group(keys("algorithm", "gdpo_reward_keys gdpo_reward_weights"), _gdpo),
    Group(
        keys("algorithm.filter_groups", "enable metric max_num_gen_batches max_inflight_gen_batches"),
        _filter_groups,
    ),
    Group(keys("async_training", "staleness_threshold trigger_parameter_sync_step"), _async_training),
)
