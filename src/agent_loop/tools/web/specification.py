"""Reader of OpenAPI specifications."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from urllib.parse import urljoin
from urllib.request import urlopen

import yaml

from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import as_yaml_1_2, reason

FETCH_TIMEOUT_S = 30.0


def read_specification(source: str) -> Mapping[str, Any]:
    """Read a specification and resolve its references.

    Args:
        source: Path or URL of a JSON or YAML file.

    Raises:
        ConfigError: The file cannot be read, or is not an OpenAPI 3 specification.
    """
    try:
        jsonref: Any = import_module("jsonref")
    except ImportError as error:
        raise ConfigError('the tools openapi need jsonref: pip install "agent-loop[openapi]"') from error
    try:
        if source.startswith(("http://", "https://")):
            with urlopen(source, timeout=FETCH_TIMEOUT_S) as answer:
                text = answer.read().decode()
        else:
            text = Path(source).read_text(encoding="utf-8")
        spec: Any = _parse_spec(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"the specification {source!r} cannot be read: {reason(error)}") from error
    if not isinstance(spec, Mapping) or not str(cast(Mapping[str, Any], spec).get("openapi", "")).startswith(
        "3."
    ):
        raise ConfigError(f"{source!r} is not an OpenAPI 3 specification")
    try:
        return jsonref.replace_refs(spec, proxies=False, lazy_load=False, loader=_refuse_to_fetch)
    except jsonref.JsonRefError as error:
        raise ConfigError(f"a reference in {source!r} cannot be resolved: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{source!r} is nested too deeply; write a flatter one") from error


def _refuse_to_fetch(uri: str) -> Any:
    """Refuse to load another document, which would be downloaded or read from this machine.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        f"it refers to another document, {uri!r}, which is not fetched; move the definition into this document"
    )


def server_url_of(spec: Mapping[str, Any], *, source: str) -> str:
    """Return the URL of a specification's first server, with the defaults of its variables.

    Raises:
        ConfigError: The specification has no server URL.
    """
    servers: list[Any] = spec.get("servers") or []
    server: Mapping[str, Any] = servers[0] if servers else {}
    url = str(server.get("url", ""))
    variables: Mapping[str, Mapping[str, Any]] = server.get("variables") or {}
    for name, variable in variables.items():
        url = url.replace(f"{{{name}}}", str(variable.get("default", "")))
    if source.startswith(("http://", "https://")):
        url = urljoin(source, url or "/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{source!r} has no server URL; set server_url")
    return url


class _JsonValues(yaml.SafeLoader):
    """YAML loader that keeps dates as text, as in JSON."""


_JsonValues.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _parse_spec(text: str) -> Any:
    """Parse JSON or YAML. JSON is tried first, since the YAML parser takes a hundred times as long for it."""
    with suppress(ValueError):
        return json.loads(text)
    return yaml.load(as_yaml_1_2(text), Loader=_JsonValues)
