"""Parser of an interaction's `config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from agent_loop.config import Section, parse_section

SettingsT = TypeVar("SettingsT", bound=Section)


def read_settings(section: type[SettingsT], config: Mapping[str, Any]) -> SettingsT:
    """Return an interaction's `config`, without `name`, as an instance of `section`.

    Raises:
        ConfigError: A key is unknown or missing, or a value is out of range.
    """
    values = {key: value for key, value in config.items() if key != "name"}
    return parse_section(section, values, where=f"config of interaction {config.get('name', '?')!r}")
