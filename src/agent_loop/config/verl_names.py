"""verl's names of settings, and the settings of this package that they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from agent_loop.errors import ConfigError

VERL_NAMES: Mapping[str, str] = {
    "actor_rollout_ref.model": "model",
    "actor_rollout_ref.rollout": "rollout",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.val_kwargs": "rollout.val",
    "actor_rollout_ref.actor": "actor",
    "actor_rollout_ref.actor.optim.lr": "actor.lr",
    "actor_rollout_ref.actor.optim.weight_decay": "actor.weight_decay",
    "actor_rollout_ref.actor.optim.betas": "actor.betas",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "actor.warmup_steps",
    "actor_rollout_ref.actor.loss_scale_factor": "actor.loss_length",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_reward_coef",
    "critic.model.path": "critic.path",
    "critic.optim.lr": "critic.lr",
    "critic.optim.weight_decay": "critic.weight_decay",
    "critic.optim.betas": "critic.betas",
    "critic.optim.lr_warmup_steps": "critic.warmup_steps",
    "critic.cliprange_value": "critic.clip_range_value",
    "trainer.critic_warmup": "critic.head_start",
    "data.max_prompt_length": "rollout.prompt_length",
    "data.max_response_length": "rollout.response_length",
    "trainer.default_local_dir": "trainer.run_dir",
    "trainer.total_training_steps": "trainer.total_steps",
    "trainer.save_freq": "trainer.save_every",
    "trainer.test_freq": "trainer.val_every",
    "custom_reward_function.path": "reward.function",
}
"""Keys of verl, or their beginnings, and the keys here. The longest match applies."""

VERL_FIXED_VALUES: Mapping[str, Any] = {
    "data.return_raw_chat": True,
    "actor_rollout_ref.rollout.mode": "async",
    "actor_rollout_ref.rollout.multi_turn.enable": True,
}
"""Keys of verl that have a single possible value here. Another value is refused."""

VERL_VALUES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "reward_model.reward_manager": ("reward.batch", {"naive": False, "batch": True}),
    "reward.reward_manager.name": ("reward.batch", {"naive": False, "batch": True}),
}
"""Keys of verl with other values than here: the key here, and the value here for each of verl's values."""

FREE_KEYS = ("engine_kwargs", "runtime_env", "algorithm.reward_parts", "algorithm.by_data_source")
"""Ends of the names of mappings whose keys are the user's. Such a key may contain dots."""


def replace_verl_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with verl's keys replaced by those of this package. Both kinds may be mixed.

    Raises:
        ConfigError: A key of verl has a value that does not exist here.
    """
    short: dict[str, Any] = {}
    for key, value in _flatten(values):
        if key in VERL_FIXED_VALUES:
            if value != VERL_FIXED_VALUES[key]:
                raise ConfigError(
                    f"{key} is {value!r}, but only {VERL_FIXED_VALUES[key]!r} is supported; remove the key"
                )
            continue
        if key in VERL_VALUES:
            key, value = _convert_value(key, value)
        _put(short, _own_name(key).split("."), value)
    return short


def _convert_value(name: str, word: Any) -> tuple[str, Any]:
    """Return the key and the value here for a key of verl and its value."""
    key, meanings = VERL_VALUES[name]
    if not isinstance(word, str) or word not in meanings:
        raise ConfigError(f"{name} is {word!r}; give {' or '.join(map(repr, meanings))}")
    return key, meanings[word]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not name.endswith(FREE_KEYS):
            flat += _flatten(cast(Mapping[str, Any], value), prefix=f"{name}.")
        else:
            flat.append((name, cast(Any, value)))
    return flat


def _own_name(key: str) -> str:
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        short = VERL_NAMES.get(".".join(parts[:length]))
        if short is not None:
            return ".".join([short, *parts[length:]])
    return key


def _put(target: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{'.'.join(path)}: {part!r} is set to a value and also has keys; remove one of them"
            )
        target = cast(dict[str, Any], inner)
    target[path[-1]] = value
