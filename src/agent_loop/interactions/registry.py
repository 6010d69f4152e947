"""Loader for the interactions of a configuration, their selection by rows, and the parser of their settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from agent_loop.config import Section, parse_section
from agent_loop.errors import ConfigError, DataError, did_you_mean
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
    """Return the configured interactions by name."""
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


def read_interaction_name(
    interaction_kwargs: Mapping[str, Any] | None, *, known: Collection[str], where: str
) -> str | None:
    """Return the name of the interaction in a row's `interaction_kwargs`, or None if the row has no interaction.

    Arguments without a name are ignored if no interaction is configured: some data sets have them in rows that only
    call tools. Fields that are None are ignored: a table has them in rows without an interaction.
    """
    given = {key: value for key, value in (interaction_kwargs or {}).items() if value is not None}
    if not given or ("name" not in given and not known):
        return None
    if "name" not in given:
        names = ", ".join(map(repr, known))
        raise DataError(
            f"{where} has no name, and the configured interactions are {names}; name one of them, or omit "
            f"{where.rpartition(' ')[2]} in rows without an interaction"
        )
    name = str(given["name"])
    if name in known:
        return name
    if known:
        raise DataError(f"{where}.name is {name!r}, which is not configured{did_you_mean(name, known)}")
    raise DataError(
        f"{where}.name is {name!r}, but no interaction is configured; set "
        "rollout.multi_turn.interaction_config_path, or remove the name"
    )


SettingsT = TypeVar("SettingsT", bound=Section)


def read_settings(section: type[SettingsT], config: Mapping[str, Any]) -> SettingsT:
    """Return an interaction's `config`, without `name`, as an instance of `section`."""
    values = {key: value for key, value in config.items() if key != "name"}
    return parse_section(section, values, where=f"config of interaction {config.get('name', '?')!r}")
