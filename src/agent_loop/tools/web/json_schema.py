"""Conversion of OpenAPI 3.0 and 3.1 schemas to plain JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any, cast

from agent_loop.errors import ConfigError
from agent_loop.tools.json_schema import MAX_DEPTH, MAX_NODES

_NOISE = frozenset({"discriminator", "example", "externalDocs", "nullable", "title", "xml"})
_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_VALUES = frozenset({"const", "default", "enum", "examples"})
_NAMED_SCHEMAS = frozenset({"patternProperties", "properties"})


def plain_schema(node: Any, *, where: str) -> Any:
    """Return a schema without the keywords of OpenAPI: `nullable` becomes a type, exclusive bounds become numbers.

    Args:
        node: A schema with all references resolved.
        where: Location of the schema, for errors.

    Raises:
        ConfigError: The schema contains itself, or is too large after the references were resolved.
    """
    return _plain(node, where=where, parents=(), nodes=count(1))


def _plain(node: Any, *, where: str, parents: tuple[int, ...], nodes: count[int]) -> Any:
    if next(nodes) > MAX_NODES or len(parents) > MAX_DEPTH:
        raise ConfigError(f"{where}: its schema is too large for a model to read; exclude it")
    if id(node) in parents:
        raise ConfigError(
            f"{where}: its schema contains itself, so it cannot be shown to a model; exclude it"
        )
    parents = (*parents, id(node))
    if isinstance(node, list):
        return [_plain(item, where=where, parents=parents, nodes=nodes) for item in cast(list[Any], node)]
    if not isinstance(node, Mapping):
        return node
    schema = cast(Mapping[str, Any], node)
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS:
            plain[key] = {
                name: _plain(inner, where=where, parents=parents, nodes=nodes)
                for name, inner in value.items()
            }
        elif key in _VALUES:
            plain[key] = value
        elif key not in _NOISE and not isinstance(schema.get(key) if key in _BOUNDS else None, bool):
            plain[key] = _plain(value, where=where, parents=parents, nodes=nodes)
    for exclusive, inclusive in _BOUNDS.items():
        if schema.get(exclusive) is True and inclusive in plain:
            plain[exclusive] = plain.pop(inclusive)
    if schema.get("nullable") and isinstance(plain.get("type"), str):
        plain["type"] = [plain["type"], "null"]
    return plain
