"""verl's function for loading interactions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.registry import load_interactions


def initialize_interactions_from_config(interaction_config_file: str | Path) -> Mapping[str, BaseInteraction]:
    """Return the interactions of a YAML file by name.

    Raises:
        ConfigError: An interaction cannot be loaded.
    """
    return load_interactions(interaction_config_file)
