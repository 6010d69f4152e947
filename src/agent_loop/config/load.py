"""Loading of settings from YAML and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from agent_loop.config.validation import parse_section
from agent_loop.config.verl.translation import Translation
from agent_loop.config.whole import Config
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import (
    merge_mappings,
    parse_override,
    read_yaml,
    resolve_interpolation,
)


def load_config(path: str | Path | None = None, *, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and `key=value` overrides.

    Relative paths in the file are relative to the working directory. `${...}` interpolation is that of OmegaConf, and
    also resolves keys that have their default value.

    Raises:
        ConfigError: The file is missing or not valid YAML, a key is unknown, or a value is out of range.
    """
    where = str(path or "overrides")
    given: Any = {} if path is None else read_yaml(path, what="config file")
    if not isinstance(given, dict):
        raise ConfigError(f"config file {str(path)!r} holds a list; it must hold sections with keys")
    translation = Translation()
    translation.add(cast(dict[str, Any], given))
    for override in overrides:
        translation.add(parse_override(override))
    return parse_section(Config, _resolved(translation.finish(), where=where), where=where)


def _resolved(values: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return the values with `${...}` resolved."""
    if "${" not in repr(values):
        return values
    defaults = Config().model_dump(mode="json")
    return resolve_interpolation(merge_mappings(defaults, values), where=where)
