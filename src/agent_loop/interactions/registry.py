"""Loader for the interactions of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from agent_loop.config import Section
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.interactions.base import BaseInteraction
from agent_loop.registries import construct, load_class, read_entries

PATH_KEY = "rollout.multi_turn.interaction_config_path"
BUILT_IN = {
    "gsm8k": "agent_loop.integrations.verl.gsm8k:Gsm8kInteraction",
    "gymnasium": "agent_loop.environments.gymnasium:GymnasiumInteraction",
    "simulated_user": "agent_loop.interactions.simulated_user:SimulatedUser",
}
"""Interactions of the package by short name. Each is imported at its first use."""

VERL_NAMES = {"verl.interactions.gsm8k_interaction.Gsm8kInteraction": "gsm8k"}
"""Replacements of verl's own interactions, so that verl's registry files load unchanged."""


class InteractionEntry(Section):
    """Entry of the YAML file for one interaction."""

    name: str | None = None
    """Name that a row's `interaction_kwargs.name` refers to. The default is the class name in lower case, without
    `Interaction`."""
    class_name: str
    """Subclass of `BaseInteraction`, as `package.module.Class` or `file.py:Class`, or a built-in interaction: `gsm8k`,
    `gymnasium` or `simulated_user`."""
    config: dict[str, Any] = Field(default={})
    """Argument `config` of the class; `name` is added to it."""


def load_interactions(config_path: str | Path | None) -> dict[str, BaseInteraction]:
    """Return the configured interactions by name.

    Args:
        config_path: YAML file with `interaction: [{class_name, name, config}]`. None configures no interaction.

    Raises:
        ConfigError: An interaction cannot be loaded, or two have the same name.
    """
    interactions: dict[str, BaseInteraction] = {}
    if config_path is None:
        return interactions
    entries = read_entries(config_path, entry_type=InteractionEntry, list_key="interaction", key=PATH_KEY)
    for index, entry in enumerate(entries):
        where = f"{config_path}: interaction[{index}]"
        loaded = _load_class(entry.class_name, key=f"{where}.class_name")
        name = entry.name or loaded.__name__.removesuffix("Interaction").lower()
        if name in interactions:
            raise ConfigError(f"{where}: there is another interaction named {name!r}; rename one of them")
        interactions[name] = construct(loaded, {**entry.config, "name": name}, where=where)
    return interactions


def _load_class(reference: str, *, key: str) -> type[BaseInteraction]:
    reference = VERL_NAMES.get(reference, reference)
    if reference.isidentifier() and reference not in BUILT_IN:
        raise ConfigError(
            f"{key} is {reference!r}, which is not a built-in interaction{did_you_mean(reference, BUILT_IN)}; "
            "use a built-in one, file.py:Class or module:Class"
        )
    return load_class(BUILT_IN.get(reference, reference), base=BaseInteraction, key=key)
