"""Import of verl, which brings its own environment and is not a dependency of this package."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from agent_loop.errors import ConfigError


@cache
def load_verl(reference: str) -> Any:
    """Return an object of verl or of TransferQueue, given as `module:name`.

    Raises:
        ConfigError: The package is not installed, or has another version.
    """
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{reference} cannot be imported: {error}; VerlAgentLoopManager runs in verl's trainer and needs verl 0.9.1"
        ) from error
