"""Loads the interactions that a configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from agent_loop.config import Section
from agent_loop.errors import ConfigError
from agent_loop.interactions.base import BaseInteraction
from agent_loop.registries import construct, load_class, read_entries

PATH_KEY = "rollout.multi_turn.interaction_config_path"


class InteractionEntry(Section):
    """One interaction of the YAML file."""

    name: str
    """What a row's `interaction_kwargs.name` chooses it by."""
    class_name: str
    """A subclass of `BaseInteraction`, as `package.module.Class` or `file.py:Class`."""
    config: dict[str, Any] = Field(default={})
    """What the class gets as `config`, with `name` added."""


def load_interactions(config_path: str | Path | None) -> dict[str, BaseInteraction]:
    """The interactions by name; none without a path.

    Args:
        config_path: YAML that holds `interaction: [{name, class_name, config}]`.

    Raises:
        ConfigError: An interaction cannot be loaded, or two have the same name.
    """
    interactions: dict[str, BaseInteraction] = {}
    if config_path is None:
        return interactions
    entries = read_entries(config_path, entry_type=InteractionEntry, list_key="interaction", key=PATH_KEY)
    for index, entry in enumerate(entries):
        where = f"{config_path}: interaction[{index}]"
        if entry.name in interactions:
            raise ConfigError(
                f"{where}: there is another interaction named {entry.name!r}; rename one of them"
            )
        loaded = load_class(entry.class_name, base=BaseInteraction, key=f"{where}.class_name")
        config = {**entry.config, "name": entry.name}
        interactions[entry.name] = construct(loaded, config, where=where)
    return interactions
