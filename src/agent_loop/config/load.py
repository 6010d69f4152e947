"""Loading of settings from YAML and the command line."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from agent_loop.config.validation import parse_section
from agent_loop.config.verl.translation import translate
from agent_loop.config.whole import Config
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import merge_mappings, parse_override, read_yaml

logger = logging.getLogger(__name__)


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
    found = translate([cast(dict[str, Any], given), *map(parse_override, overrides)], where=where)
    problems = [report.note for report in found.reports if report.status == "not supported"]
    if problems:
        raise ConfigError(f"{where}: " + "\n".join(problems))
    for report in found.reports:
        if report.status == "different":
            logger.warning("%s: %s", ", ".join(report.given), report.note)
    return parse_section(
        Config, merge_mappings(found.settings, found.unknown), where=where, names=found.names
    )
