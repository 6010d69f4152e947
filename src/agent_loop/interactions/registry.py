"""Loads the interactions that a configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from agent_loop.config import Section
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.interactions.base import BaseInteraction
from agent_loop.registries import construct, load_class, read_entries

PATH_KEY = "rollout.multi_turn.interaction_config_path"
KIT = {
    "gsm8k": "agent_loop.integrations.verl.gsm8k:Gsm8kInteraction",
    "gymnasium": "agent_loop.interactions.gymnasium:GymnasiumInteraction",
    "simulated_user": "agent_loop.interactions.simulated_user:SimulatedUser",
}
"""The interactions that come with the package, by their short names; each is imported when it is named."""

VERL_NAMES = {"verl.interactions.gsm8k_interaction.Gsm8kInteraction": "gsm8k"}
"""What stands in for verl's own interactions, so that its registry files can be read as they are."""


class InteractionEntry(Section):
    """One interaction of the YAML file."""

    name: str | None = None
    """What a row's `interaction_kwargs.name` chooses it by; by default the class's name, in lower case and without
    `Interaction`."""
    class_name: str
    """A subclass of `BaseInteraction`, as `package.module.Class` or `file.py:Class`, or one of the kit: `gsm8k`,
    `gymnasium`, `simulated_user`."""
    config: dict[str, Any] = Field(default={})
    """What the class gets as `config`, with `name` added."""


def load_interactions(config_path: str | Path | None) -> dict[str, BaseInteraction]:
    """The interactions by name; none without a path.

    Args:
        config_path: YAML that holds `interaction: [{class_name, name, config}]`.

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
    if reference.isidentifier() and reference not in KIT:
        raise ConfigError(
            f"{key} is {reference!r}, no interaction of the kit{did_you_mean(reference, KIT)}; "
            "or give file.py:Class or module:Class"
        )
    return load_class(KIT.get(reference, reference), base=BaseInteraction, key=key)
