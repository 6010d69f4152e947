"""Secrets in a tool's config: named there, read from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from string import Template

from agent_loop.errors import ConfigError


def from_environment(values: Mapping[str, str], *, where: str) -> dict[str, str]:
    """The values with each `$NAME` in them replaced by that environment variable; `$$` is a dollar sign.

    Raises:
        ConfigError: A variable is not set.
    """
    read: dict[str, str] = {}
    for key, value in values.items():
        try:
            read[key] = Template(value).substitute(os.environ)
        except KeyError as error:
            raise ConfigError(
                f"{where}.{key} needs the environment variable {error.args[0]}, which is not set; set it"
            ) from None
        except ValueError as error:
            raise ConfigError(
                f"{where}.{key} is no template: {error}; write $NAME, or $$ for a dollar"
            ) from error
    return read
