"""API key of an endpoint with OpenAI's chat completions."""

from __future__ import annotations

import os

from agent_loop.errors import ConfigError

NO_KEY = "none"
"""Placeholder for endpoints without authentication, because the client requires a key."""


def read_api_key(variable: str | None) -> str:
    """Return the API key in an environment variable. Return a placeholder if `variable` is None."""
    if variable is None:
        return NO_KEY
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f"api_key_env is {variable!r}, but that environment variable is not set; set it")
    return key
