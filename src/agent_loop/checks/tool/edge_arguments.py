"""Unusual arguments that a schema allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from agent_loop.tools.schema import check_arguments

MAX_EDGES = 60
LONG = 5000

_EDGES: Mapping[str, tuple[Any, ...]] = {
    "string": ("", " ", "0", "\0", "\N{GRINNING FACE}'\"\\\n", "../..", "<|im_end|>", "x" * LONG),
    "integer": (0, -1, 1, 2**31, -(2**63), 10**30),
    "number": (0, -1, 0.5, 1e-300, -1e300, 10**30),
    "boolean": (True, False),
    "array": ([],),
    "object": ({},),
    "null": (None,),
}


def edge_arguments(tool_schema: Mapping[str, Any], example: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return unusual calls that match the schema.

    They are variants of the example: one argument replaced or left out, or only the required arguments.
    """
    fitting: list[dict[str, Any]] = []
    for arguments in _variants(tool_schema["function"].get("parameters") or {}, example):
        if arguments not in fitting and check_arguments(tool_schema, arguments) is None:
            fitting.append(arguments)
    return fitting[:MAX_EDGES]


def _variants(parameters: Mapping[str, Any], example: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    properties: Mapping[str, Any] = parameters.get("properties", {})
    yield {name: example[name] for name in parameters.get("required", []) if name in example}
    for name, schema in properties.items():
        yield {other: value for other, value in example.items() if other != name}
        for value in _values(schema):
            yield {**example, name: value}


def _values(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield unusual values that a schema may allow. Lists are empty, or hold one unusual item."""
    types: Any = schema.get("type", list(_EDGES))
    for type_ in cast(list[str], types) if isinstance(types, list) else [types]:
        yield from _EDGES.get(type_, ())
        if type_ == "array":
            yield from ([item] for item in _values(schema.get("items") or {"type": "string"}))
