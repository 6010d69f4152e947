"""Names of settings in verl, and the settings that they mean here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from agent_loop.errors import ConfigError

LONG_NAMES: Mapping[str, str] = {
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
"""Names of other systems' configurations and the keys that they mean here; the longest match counts."""

FIXED_LONG_NAMES: Mapping[str, Any] = {
    "data.return_raw_chat": True,
    "actor_rollout_ref.rollout.mode": "async",
    "actor_rollout_ref.rollout.multi_turn.enable": True,
}
"""Switches of other systems that cannot be set otherwise here: accepted with this value, refused with another."""

WORDS_OF_LONG_NAMES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "reward_model.reward_manager": ("reward.batch", {"naive": False, "batch": True}),
    "reward.reward_manager.name": ("reward.batch", {"naive": False, "batch": True}),
}
"""Names of other systems' configurations whose values are words: the key here, and what each word means."""


def with_short_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrites long names key by key, so that they mix freely with short ones."""
    short: dict[str, Any] = {}
    for key, value in _flatten(values):
        if key in FIXED_LONG_NAMES:
            if value != FIXED_LONG_NAMES[key]:
                raise ConfigError(
                    f"{key} is {value!r}; only {FIXED_LONG_NAMES[key]!r} exists here, so leave it out"
                )
            continue
        if key in WORDS_OF_LONG_NAMES:
            key, value = _read_word(key, value)
        _put(short, _short_name(key).split("."), value)
    return short


def _read_word(name: str, word: Any) -> tuple[str, Any]:
    """Return the key and the value that a word of another system means."""
    key, meanings = WORDS_OF_LONG_NAMES[name]
    if not isinstance(word, str) or word not in meanings:
        raise ConfigError(f"{name} is {word!r}; only {' and '.join(map(repr, meanings))} exist here")
    return key, meanings[word]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not name.endswith(("engine_kwargs", "runtime_env")):
            flat += _flatten(cast(Mapping[str, Any], value), prefix=f"{name}.")
        else:
            flat.append((name, cast(Any, value)))
    return flat


def _short_name(key: str) -> str:
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        short = LONG_NAMES.get(".".join(parts[:length]))
        if short is not None:
            return ".".join([short, *parts[length:]])
    return key


def _put(target: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(path)}: {part!r} is given both a value and keys of its own")
        target = cast(dict[str, Any], inner)
    target[path[-1]] = value
