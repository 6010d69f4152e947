"""Environment variables in a tool's config, which keep secrets out of the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from string import Template

from agent_loop.errors import ConfigError


def expand_variables(values: Mapping[str, str], *, where: str) -> dict[str, str]:
    """Return the values with each `$NAME` replaced by that environment variable; `$$` is a dollar sign.

    Raises:
        ConfigError: A variable is not set, or a value is not a valid template.
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
                f"{where}.{key} is not a valid template: {error}; write $NAME, or $$ for a dollar sign"
            ) from error
    return read
